"""What only a GPU can show: streams, graphs, array families, copies by name, and the softmax kernels."""

import concurrent.futures
import types

import numpy as np
import pytest
from contracts.forward import problem, same_bits

import numba_flash
from numba_flash import testing
from numba_flash.gpu import tile_counters as counters
from numba_flash.select import rungs

GPU_KERNELS = [name for name in rungs.RUNGS if name not in ("reference", "cpu")]


@pytest.fixture(scope="session")
def cupy():
    import cupy

    return cupy


def on_gpu(cupy, case):
    return [cupy.asarray(x) for x in (case.q, case.k, case.v)]


# The stream that CuPy works on, and one that is named; without tensor cores and with them.
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_work_is_done_on_the_callers_stream(cupy, named, dtype):
    case = problem(64, 64, head_dim=16, dtype=dtype)
    expected = numba_flash.attention(*on_gpu(cupy, case)).get()
    stream = cupy.cuda.Stream(non_blocking=True)
    for time in ("first", "second"):
        with stream:
            q, k, v = on_gpu(cupy, case)
            slow = cupy.ones((4096, 4096), cupy.float32)
            for _ in range(20):
                slow = slow @ slow * 1e-6  # q is written while this is still running
            q += slow[0, 0] * 0
            o = numba_flash.attention(q, k, v, stream=stream if named else None)
            # The first time CuPy compiles its kernels, which may take longer than all of this.
            assert time == "first" or not stream.done, "the host waited"
            result = o.get()
        assert same_bits(result, expected)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (64, True), (128, False), (128, True), (256, True)])
def test_bits_do_not_depend_on_what_else_keeps_the_gpu_busy(cupy, head_dim, causal):
    """Alone, a batch entry may be computed in tiles of fewer rows than in a crowd; and NaN that rows do not see makes
    some of them be computed anew."""
    case = problem(700, 700, batch=40, heads=8, head_dim=head_dim, dtype="float16", causal=causal, seed=3)
    if causal:
        case.v[17, :, 150] = np.nan
    crowd = on_gpu(cupy, case)
    alone = [x[17:18] for x in crowd]
    options = dict(causal=causal, return_lse=True)
    configs = [numba_flash.explain(*given, **options).config for given in (crowd, alone)]
    if configs[0].kernel == "wgmma" and not causal:
        assert configs[0].tile_m > configs[1].tile_m
    (o, lse), (o_alone, lse_alone) = (numba_flash.attention(*given, **options) for given in (crowd, alone))
    assert same_bits(o[17:18].get(), o_alone.get()) and same_bits(lse[17:18].get(), lse_alone.get())


@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_a_graph_replays_with_new_inputs(cupy, kernel):
    """Captured once, with out= and without; replayed on what the arrays hold by then."""
    case = problem(40, 40, head_dim=64, dtype="float16")
    q, k, v = on_gpu(cupy, case)
    try:
        numba_flash.explain(q, k, v, kernel=kernel)
    except NotImplementedError as refused:
        pytest.skip(f"not on this GPU: {refused}")
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):  # loads the kernel; memory for the results is in CuPy's pool afterwards
            numba_flash.attention(q, k, v, out=out, kernel=kernel)
            numba_flash.attention(q, k, v, return_lse=True, kernel=kernel)
        stream.synchronize()
        stream.begin_capture()
        numba_flash.attention(q, k, v, out=out, kernel=kernel)
        o, lse = numba_flash.attention(q, k, v, return_lse=True, kernel=kernel)
        graph = stream.end_capture()
    for factor in (2, -3):
        with stream:
            q *= factor
            v += factor
            out.fill(0)
            o.fill(0)
            graph.launch(stream)
            stream.synchronize()
        case.q, case.k, case.v = q.get(), k.get(), v.get()
        testing.check(case, out.get())
        testing.check(case, o.get(), lse.get())


@pytest.mark.parametrize("how", ["dropped", "of each thread"])
def test_launches_beside_each_other_do_not_disturb_each_other(cupy, how):
    """On streams that are dropped while they work, whose handles come back; and on each thread's own default stream."""
    case = problem(1024, 1024, batch=2, heads=8, head_dim=64, dtype="float16", causal=True)
    q, k, v = on_gpu(cupy, case)
    expected = numba_flash.attention(q, k, v, causal=True)
    outs = [cupy.zeros_like(q) for _ in range(48)]
    cupy.cuda.Device().synchronize()

    def fill(some, stream):
        for out in some:
            numba_flash.attention(q, k, v, causal=True, out=out, stream=stream)

    if how == "dropped":
        for out in outs:
            fill([out], cupy.cuda.Stream(non_blocking=True))
    else:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(fill, [outs[i::4] for i in range(4)], [cupy.cuda.Stream.ptds] * 4))
    cupy.cuda.Device().synchronize()
    assert all(bool((out == expected).all()) for out in outs)


@pytest.mark.parametrize("named", [False, True])
def test_the_producers_of_all_arrays_are_waited_for(cupy, named):
    """By the CUDA Array Interface each array says on which stream it is still being written."""
    case = problem(64, 64, head_dim=16)
    expected = numba_flash.attention(*on_gpu(cupy, case)).get()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    slow = cupy.ones((4096, 4096), cupy.float32)
    out = cupy.zeros(case.q.shape, cupy.float32)
    given, kept = [], []
    for stream, x in zip(streams, on_gpu(cupy, case), strict=False):
        y = cupy.zeros_like(x)
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(20):
                kept.append(slow @ slow)
            y[...] = x
        kept.append(y)  # the interface alone would not, and the next array would lie in its memory
        interface = dict(y.__cuda_array_interface__, stream=stream.ptr)
        given.append(types.SimpleNamespace(__cuda_array_interface__=interface))
    result = types.SimpleNamespace(__cuda_array_interface__=dict(out.__cuda_array_interface__, stream=None))
    numba_flash.attention(*given, out=result, stream=streams[3] if named else None)
    cupy.cuda.Device().synchronize()
    assert same_bits(out.get(), expected)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_streams_that_are_named_share_no_workspace(cupy, library):
    """A backward's own memory is not given to the next one while it is in use, whatever stream is current."""
    torch = pytest.importorskip("torch", reason="needs torch") if library == "torch" else None
    if torch is not None and not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    case = problem(1024, 1024, batch=2, heads=8, head_dim=64, dtype="float16", causal=True)
    move = cupy.asarray if torch is None else lambda x: torch.from_numpy(x).cuda()
    q, k, v = (move(x) for x in (case.q, case.k, case.v))
    inputs = [(q, k, v), (k[:, :1] * 0 + q, k, v * 2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in inputs]
    forward = [numba_flash.attention(*x, causal=True, return_lse=True) for x in inputs]

    def gradients(number, stream):
        o, lse = forward[number]
        return numba_flash.attention_backward(o, *inputs[number], o, lse, causal=True, stream=stream)[:3]

    cupy.cuda.Device().synchronize()
    expected = []
    for number in range(2):
        expected.append(gradients(number, None))
        cupy.cuda.Device().synchronize()
    found = [[gradients(number, streams[number]) for number in range(2)] for _ in range(20)]
    cupy.cuda.Device().synchronize()
    for turn in found:
        for mine, right in zip(turn, expected, strict=True):
            assert all(bool((x == y).all()) for x, y in zip(mine, right, strict=True))


def test_more_captured_launches_than_counters_are_at_hand(cupy, monkeypatch):
    """Memory for more of them is made while the stream is captured."""
    case = problem(40, 40, head_dim=64, dtype="float16")
    q, k, v = on_gpu(cupy, case)
    outs = [cupy.zeros_like(q) for _ in range(12)]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        expected = numba_flash.attention(q, k, v)
        stream.synchronize()
        monkeypatch.setattr(counters, "SLAB", 5 * counters.SPACING)
        monkeypatch.setattr(counters, "_unused", {})
        stream.begin_capture()
        for out in outs:
            numba_flash.attention(q, k, v, out=out)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert all(bool((out == expected).all()) for out in outs)


def test_numpy_arrays_go_to_a_kernel_that_is_named_and_come_back(cupy):
    case = problem(causal=True)
    assert numba_flash.explain(**case.arguments(), kernel="v2").copies
    o, lse = numba_flash.attention(**case.arguments(), kernel="v2", return_lse=True)
    assert isinstance(o, np.ndarray) and isinstance(lse, np.ndarray)
    testing.check(case, o, lse)


def test_host_and_device_arrays_are_not_mixed(cupy):
    case = problem()
    q, k, v = on_gpu(cupy, case)
    with pytest.raises(TypeError, match="one kind.*cupy.*numpy"):
        numba_flash.attention(q, case.k, v)


def test_numba_arrays_come_back_as_numba_arrays(cupy):
    from numba_flash.machine import toolchain

    case = problem()
    q, k, v = (toolchain.cuda().to_device(x) for x in (case.q, case.k, case.v))
    o = numba_flash.attention(q, k, v)
    assert type(o) is type(q)
    testing.check(case, o.copy_to_host())


def test_torch_tensors_come_back_as_torch_tensors(cupy):
    torch = pytest.importorskip("torch", reason="needs torch")
    if not torch.cuda.is_available():
        pytest.skip("needs torch with CUDA")
    case = problem()
    q, k, v = (torch.from_numpy(x).cuda() for x in (case.q, case.k, case.v))
    o = numba_flash.attention(q, k, v)
    assert isinstance(o, torch.Tensor) and o.device == q.device
    testing.check(case, o.cpu().numpy())


@pytest.mark.parametrize("dtype", ["float32", "float16"])  # without tensor cores, with them
def test_lengths_on_the_device_are_clamped(cupy, dtype):
    case = problem(head_dim=16, dtype=dtype, seqlens_k=np.array([30, 0], np.int32))
    q, k, v = on_gpu(cupy, case)
    o, lse = numba_flash.attention(q, k, v, seqlens_k=cupy.array([99, -5], cupy.int32), return_lse=True)
    testing.check(case, o.get(), lse.get())


@pytest.mark.parametrize("dtype", testing.DTYPES)  # all that are taken
@pytest.mark.parametrize("kernel", ["safe", "online", "blocked"])
def test_softmax(cupy, kernel, dtype):
    x = (5 * np.random.default_rng(0).standard_normal((7, 333))).astype(dtype)
    y = numba_flash.softmax(cupy.asarray(x), kernel=kernel).get().astype(np.float64)
    eps = testing.EPS[dtype] + 64 * testing.EPS["float32"]
    expected = numba_flash.softmax(x.astype(np.float64), kernel="reference")
    assert np.allclose(y, expected, rtol=eps, atol=1e-7)
