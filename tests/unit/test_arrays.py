"""Array families on the host: what comes in is read in place, and the same kind goes out."""

import contextlib
import sys

import ml_dtypes
import numpy as np
import pytest
from contracts.forward import problem, same_bits

import numba_flash
from numba_flash import arrays, testing
from numba_flash.arrays import read, reading, streams
from numba_flash.dispatch.launch import Launch
from numba_flash.problem.options import Operands

KERNELS = ["reference", "cpu"]  # the rungs that compute in host memory


class Bare:
    """An array of which only the DLPack protocol is known."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class Subclass(np.ndarray):
    pass


# How a NumPy array may lie, and each item size; the address is that of element [0, 0, ...].
@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((2, 3), np.float64)[::-1, ::-1],
        np.zeros((4, 6), np.float16)[1::2, ::3],
        np.asfortranarray(np.zeros((2, 3), ml_dtypes.bfloat16)),
        np.array(True),
        np.zeros((0, 3), np.int32),
        np.zeros((2, 3), np.float32).view(Subclass),
        np.broadcast_to(np.float32(1), (2, 3)),
    ],
)
def test_numpy_arrays_are_read_in_place(x):
    array = read("x", x)
    assert array.owner is x and array.pointer == x.__array_interface__["data"][0]
    facts = array.layout
    assert (facts.family, facts.device, facts.shape, facts.dtype) == ("numpy", None, x.shape, x.dtype.name)
    assert tuple(s * facts.unit for s in facts.strides) == x.strides and facts.readonly == (not x.flags.writeable)
    assert np.shares_memory(arrays.host_view(array), x) or x.size == 0


def test_a_foreign_byte_order_is_another_dtype():
    assert read("x", np.zeros(3, ">f4")).layout.dtype == ">f4" != read("x", np.zeros(3, "<f4")).layout.dtype


def test_read_only_and_writable_arrays_are_told_apart():
    x = np.zeros(3)
    frozen = x.view()
    frozen.flags.writeable = False
    assert [read("x", each).layout.readonly for each in (x, frozen, x, frozen)] == [False, True, False, True]


# Bytes of one element more and less than its strides reach.
@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (np.zeros((3, 4), np.float32), (0, 48)),
        (np.zeros((3, 4), np.float32)[::-1], (-32, 16)),
        (np.zeros((3, 4), np.float32)[:, ::2], (0, 44)),
        (np.zeros((0, 4), np.float32), (0, 0)),
        (np.zeros((), np.float64), (0, 8)),
    ],
)
def test_byte_bounds(x, expected):
    assert read("x", x).layout.byte_bounds == expected


@pytest.mark.parametrize("kernel", KERNELS)
def test_numpy_subclasses_are_taken(kernel):
    case = problem()
    expected = numba_flash.attention(case.q, case.k, case.v, kernel=kernel)
    result = numba_flash.attention(*(x.view(Subclass) for x in (case.q, case.k, case.v)), kernel=kernel)
    assert same_bits(result, expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bare_dlpack_object_needs_out(kernel):
    case = problem()
    q, k, v = (Bare(x) for x in (case.q, case.k, case.v))
    assert read("q", q).layout.family == "foreign" and read("q", q).pointer == read("q", case.q).pointer
    with pytest.raises(TypeError, match=r"Bare.*pass out="):
        numba_flash.attention(q, k, v, kernel=kernel)
    out = np.zeros_like(case.q)
    bare = Bare(out)
    assert numba_flash.attention(q, k, v, kernel=kernel, out=bare) is bare
    assert same_bits(out, numba_flash.attention(case.q, case.k, case.v, kernel=kernel))
    with pytest.raises(TypeError, match="one kind.*out is numpy"):
        numba_flash.attention(q, k, v, kernel=kernel, out=out)


@pytest.mark.parametrize("kernel", KERNELS)
def test_bfloat16_by_dlpack_alone(kernel):
    """NumPy reads no bfloat16 by DLPack."""
    torch = pytest.importorskip("torch", reason="needs torch")
    x, out = torch.randn(1, 2, 5, 8).bfloat16(), torch.zeros(1, 2, 5, 8).bfloat16()
    array = read("q", Bare(x))
    assert array.pointer == x.data_ptr() and array.layout.dtype == "bfloat16"
    numba_flash.attention(Bare(x), Bare(x), Bare(x), kernel=kernel, out=Bare(out))
    assert torch.equal(out, numba_flash.attention(x, x, x, kernel=kernel))


def test_what_another_library_says_of_its_array_has_the_name_of_the_argument():
    torch = pytest.importorskip("torch", reason="needs torch")

    class Broken(Bare):
        def __dlpack__(self, **options):
            raise AssertionError("not today")

    with pytest.raises(TypeError, match="v: Bare cannot be read, RuntimeError: .*dtype"):
        read("v", Bare(torch.zeros(2).to(torch.float8_e4m3fn)))
    with pytest.raises(TypeError, match="k: Broken cannot be read, AssertionError: not today"):
        read("k", Broken(np.zeros(2)))


def test_objects_without_a_protocol_are_refused():
    with pytest.raises(TypeError, match="q must be an array"):
        read("q", object())


def test_outputs_are_new_contiguous_and_of_the_dtype():
    for dtype in testing.DTYPES:
        made = arrays.empty(read("q", problem(dtype=dtype).q), (2, 3), dtype).owner
        assert type(made) is np.ndarray and made.flags.c_contiguous and made.dtype.name == dtype


def test_strides_of_torch_tensors():
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.zeros(2, 3, 4, 8)
    for y in (
        x, x.transpose(1, 2), x[:, :, 1:], x[:1], x[:, :0], x.flip(3), x[..., 3:4], x[:1, :1], torch.zeros(()),
        x.as_strided((1, 3, 1, 8), (7, 8, 5, 1)), x[:, :1].expand(2, 3, 4, 8),
    ):  # fmt: skip
        layout = arrays.read("x", y).layout
        assert layout.shape == tuple(y.shape)
        pairs = zip(layout.strides, y.stride(), y.shape, strict=True)
        assert y.numel() == 0 or all(mine == theirs for mine, theirs, extent in pairs if extent > 1)
        assert layout.contiguous >= (0 not in y.shape and y.is_contiguous())
        assert arrays.read("x", y.clone(memory_format=torch.contiguous_format)).layout.contiguous


def test_torch_tensors_whose_numbers_are_not_in_their_memory():
    torch = pytest.importorskip("torch", reason="needs torch")
    z = torch.randn(1, 1, 4, 8, dtype=torch.complex64)
    for strange in (z.conj().imag, torch._neg_view(torch.ones(1, 1, 4, 8)), torch._efficientzerotensor(2, 3)):
        with pytest.raises(TypeError, match="k: a torch tensor must have its own numbers"):
            arrays.read("k", strange)
    assert arrays.read("k", z.conj().imag.resolve_neg()).layout.shape == (1, 1, 4, 8)
    assert arrays.read("k", torch.empty(0, 3)).layout.shape == (0, 3)


def test_torch_outputs_are_contiguous_whatever_q_is():
    torch = pytest.importorskip("torch", reason="needs torch")
    for q in (
        torch.ones(1, 2, 3, 8),
        torch.ones(1, 3, 2, 8).transpose(1, 2),
        torch.ones(1, 1, 1, 8).expand(1, 2, 3, 8),
    ):
        for shape, dtype in (((1, 2, 3, 8), "float32"), ((1, 2, 3, 5), "float32"), ((1, 2, 3, 8), "float16")):
            made = arrays.empty(read("q", q), shape, dtype).owner
            assert tuple(made.shape) == shape and made.is_contiguous() and made.dtype is getattr(torch, dtype)


@pytest.mark.parametrize("options", [{}, {"max_version": (1, 0)}], ids=["before 1.0", "1.0"])
def test_bfloat16_is_handed_over_as_such(options):
    torch = pytest.importorskip("torch", reason="needs torch")
    bits = torch.arange(-3, 9, dtype=torch.bfloat16).reshape(3, 4).view(torch.int16).numpy()
    handed = torch.utils.dlpack.from_dlpack(arrays.as_bfloat16(bits.__dlpack__(**options)))
    assert handed.dtype is torch.bfloat16 and handed.tolist() == [[-3, -2, -1, 0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert handed.data_ptr() == bits.ctypes.data


@pytest.mark.parametrize("dtype", testing.DTYPES)  # each has its own name in torch
@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_tensors_in_and_out(kernel, dtype):
    torch = pytest.importorskip("torch", reason="needs torch")
    case = problem(dtype=dtype, causal=True)

    def tensor(x):
        bits = torch.from_numpy(x.view(np.int16) if dtype == "bfloat16" else x)
        return bits.view(torch.bfloat16) if dtype == "bfloat16" else bits

    q, k, v = (tensor(x) for x in (case.q, case.k, case.v))
    array = read("q", q)
    assert array.pointer == q.data_ptr() and array.layout.family == "torch" and array.layout.dtype == dtype
    o, lse = numba_flash.attention(q, k, v, causal=True, kernel=kernel, return_lse=True)
    assert isinstance(o, torch.Tensor) and o.dtype == q.dtype and isinstance(lse, torch.Tensor)
    testing.check(case, arrays.host_view(read("o", o)), lse.numpy())
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    again = numba_flash.attention(turned, k, v, causal=True, kernel=kernel)
    assert torch.equal(again, o)
    out = torch.full((2, 20, 2, 4), float("nan"), dtype=q.dtype).transpose(1, 2)
    assert numba_flash.attention(q, k, v, causal=True, kernel=kernel, out=out) is out and torch.equal(out, o)


def test_torch_agrees_about_attention():
    torch = pytest.importorskip("torch", reason="needs torch")
    case = problem(30, 30, heads=4, heads_kv=4, dtype="float64", head_dim=16)
    q, k, v = (torch.from_numpy(x) for x in (case.q, case.k, case.v))
    for causal in (False, True):
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).numpy()
        for kernel in KERNELS:
            o = numba_flash.attention(case.q, case.k, case.v, causal=causal, kernel=kernel)
            assert np.allclose(o, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
def test_jax_arrays_in_and_out(kernel):
    jax = pytest.importorskip("jax", reason="needs jax")
    case = problem()
    q, k, v = (jax.numpy.asarray(x) for x in (case.q, case.k, case.v))
    o, lse = numba_flash.attention(q, k, v, kernel=kernel, return_lse=True)
    assert isinstance(o, jax.Array) and isinstance(lse, jax.Array)
    testing.check(case, np.asarray(o), np.asarray(lse))
    with pytest.raises(NotImplementedError, match="traced"):
        jax.jit(numba_flash.warmup)(q, k, v)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_copy_of_the_inputs_is_made(kernel, monkeypatch):
    """What a rung reads are the caller's own addresses, and its results lie where they are handed out."""
    case = problem()
    seen = {}

    class Spy(Launch):
        def run(self, operands, stream):
            named = zip(Operands._fields, operands, strict=True)
            seen.update({name: array.pointer for name, array in named if array is not None})

    monkeypatch.setattr("numba_flash.dispatch.forward.make_launch", lambda *about: Spy())
    monkeypatch.setattr("numba_flash.dispatch.forward._plans", {})  # nothing prepared before
    o = numba_flash.attention(case.q, case.k, case.v, kernel=kernel)
    for name, x in (("q", case.q), ("k", case.k), ("v", case.v), ("o", o)):
        assert seen[name] == x.ctypes.data


class Stream:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


# torch's, CuPy's, Numba's (plain and as a ctypes pointer) and a bare address.
@pytest.mark.parametrize(
    "stream", [7, Stream(cuda_stream=7), Stream(ptr=7), Stream(handle=7), Stream(handle=Stream(value=7))]
)
def test_streams_are_addresses(stream):
    assert streams.address_of(stream) == 7


# Which streams the one that is worked on waits for: those of all producers, but for itself and for nothing twice.
@pytest.mark.parametrize(
    ("streams", "stream", "expected"),
    [
        ((None, None), None, (0, [])), ((7, None), None, (7, [])), ((7, 8), None, (7, [(7, 8)])),
        ((None, 8), None, (0, [(1, 8)])), ((1, 8), None, (1, [(1, 8)])), ((7, 7), 9, (9, [(9, 7)])),
        ((1, 9), 9, (9, [(9, 1)])), ((8, 7), 0, (0, [(1, 7), (1, 8)])),
    ],
)  # fmt: skip
def test_producers_are_waited_for(streams, stream, expected, monkeypatch):
    waited = []

    class CoreStream:
        def __init__(self, address):
            self.address = address

        @staticmethod
        def from_handle(address):
            assert address > 1
            return CoreStream(address)

        def wait(self, other):
            waited.append((self.address, other.address))

    def ensure(device):
        assert device == 0 and not waited
        ensured.append(device)

    ensured = []
    monkeypatch.setattr("numba_flash.machine.context.ensure", ensure)
    core = Stream(Stream=CoreStream, LEGACY_DEFAULT_STREAM=CoreStream(1))
    monkeypatch.setitem(sys.modules, "cuda.core", core)
    monkeypatch.setattr(reading, "_device_of", lambda pointer: 0)

    def array(after):
        interface = dict(data=(4096, False), typestr="<f4", shape=(2, 3), version=3, stream=after)
        return arrays.read("x", Stream(__cuda_array_interface__=interface))

    given = [array(streams[0]), None, array(streams[1])]
    assert (arrays.stream_of(given, stream), waited) == expected
    assert bool(ensured) == bool(waited)


# (CuPy's current stream, the one to work on, what is current while memory is taken)
@pytest.mark.parametrize(
    ("current", "stream", "while_taken"),
    [(0, 0, []), (0, 1, []), (7, 7, []), (0, 7, [0, 7]), (7, 0, [0, "null"]), (7, 9, [0, 9])],
)
@pytest.mark.parametrize("take", ["empty_for", "scratch"])
def test_memory_is_taken_for_the_stream_that_is_worked_on(current, stream, while_taken, take, monkeypatch):
    entered, seen = [], []

    @contextlib.contextmanager
    def current_as(what):
        entered.append(what)
        yield
        entered.pop()

    def ndarray(shape, dtype):
        seen.append(list(entered))
        return Stream(data=Stream(ptr=64))

    class BaseStream:
        def __init__(self, address, device):
            assert device == -1
            self.address = address

        def __enter__(self):
            entered.append(self.address)

        def __exit__(self, *error):
            entered.pop()

    class ExternalStream(BaseStream):
        def __init__(self, address):
            raise DeprecationWarning("as CuPy 14 says it")

    cuda = Stream(
        Device=current_as, ExternalStream=ExternalStream, Stream=Stream(null=current_as("null")),
        runtime=Stream(getDevice=lambda: 0, getDeviceCount=lambda: 2),
        get_current_stream=lambda device: Stream(ptr=current),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "cupy", Stream(cuda=cuda, ndarray=ndarray))
    like = arrays.Array(4096, arrays.Layout("cupy", 0, (3,), (4,), 1, "float32", False), None)
    if take == "scratch":
        arrays.scratch(like, (2,), "float32", stream)
    else:
        arrays.empty_for(stream, like, (2,), "float32")
    assert seen == [while_taken] and not entered


def test_what_is_no_stream_is_refused():
    with pytest.raises(TypeError, match="stream must be a stream of CuPy, torch, Numba or cuda.core.* not str"):
        streams.address_of("7")
