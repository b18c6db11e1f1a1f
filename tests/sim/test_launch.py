"""How kernels are launched in the simulator, and the private facts of it that this relies on."""

import threading
import time
import warnings

import numpy as np
import pytest
from contracts.forward import problem

import numba_flash
from numba_flash import mods, testing
from numba_flash.abi.parameters import StatesTile
from numba_flash.config.aux_gradients import AuxRoundConfig, AuxStartConfig, DauxConfig
from numba_flash.config.backward import (
    MmaDauxConfig,
    MmaDbiasConfig,
    MmaDkdvConfig,
    MmaDqConfig,
    MmaOneKeyTileConfig,
    PreprocessConfig,
)
from numba_flash.config.bias_rows import BiasRowsConfig
from numba_flash.config.decode import DecodeConfig
from numba_flash.config.kvcache import AppendConfig, PagedConfig
from numba_flash.config.mask_bits import MaskBitsConfig
from numba_flash.config.mma_forward import MmaConfig
from numba_flash.config.mma_fused import MmaDqFinishConfig, MmaFusedConfig
from numba_flash.config.outside import OutsideConfig
from numba_flash.config.simt_backward import (
    DbiasConfig,
    DbiasSumConfig,
    DeltaConfig,
    DkdvConfig,
    DqConfig,
    HeadSumsConfig,
)
from numba_flash.config.simt_forward import V1Config, V2Config
from numba_flash.config.softmax import SOFTMAX
from numba_flash.config.tile_states import MaskModBitsConfig, TileOrderConfig, TileStatesConfig
from numba_flash.config.wgmma_backward import (
    WgmmaDkdvConfig,
    WgmmaDqConfig,
    WgmmaFusedConfig,
)
from numba_flash.config.wgmma_backward_ends import WgmmaAddPartsConfig, WgmmaRoundConfig
from numba_flash.config.wgmma_backward_float32 import (
    WgmmaDkdvFloat32Config,
    WgmmaDqFloat32Config,
    WgmmaPairedDkdvConfig,
    WgmmaPairedDqConfig,
)
from numba_flash.config.wgmma_float32 import WgmmaFloat32Config
from numba_flash.config.wgmma_forward import WgmmaConfig
from numba_flash.config.wgmma_join import WgmmaJoinConfig
from numba_flash.debug.kernels import modules
from numba_flash.dispatch.simulated import simulated_seconds
from numba_flash.functions.function import Function
from numba_flash.gpu.compiled import source
from numba_flash.machine import toolchain
from numba_flash.problem.options import uses
from numba_flash.ptx.sim import launch, numbers
from numba_flash.ptx.sim.launch import Pointer
from numba_flash.select.rungs import RUNGS

cuda = None  # `numba.cuda`, put here by the tests: the simulator swaps module globals that are this module


@pytest.fixture(autouse=True)
def numba_cuda(monkeypatch):
    monkeypatch.setitem(globals(), "cuda", toolchain.cuda())


def test_the_simulator_is_what_runs():
    assert toolchain.simulated() and toolchain.unusable() is None
    assert numba_flash.explain(**problem().arguments()).kernel == "v2"


# Canaries: a new numba-cuda that changes one of these breaks the rungs, and should be named by it.


def test_canary_pointers_pass_through_and_dynamic_shared_memory_has_its_size():
    seen = []

    @cuda.jit
    def kernel(pointer, nothing, numbers):
        smem = cuda.shared.array(0, np.dtype("float32"))
        smem[cuda.threadIdx.x] = cuda.threadIdx.x
        cuda.syncthreads()
        seen.append((type(pointer), nothing, numbers, len(smem), float(smem[1])))

    kernel[1, 2, 0, 64](Pointer(np.zeros(3)), None, (1, 2))
    assert seen == [(Pointer, None, (1, 2), 16, 1.0)] * 2


def test_canary_a_kernel_called_in_a_launch_is_a_device_function():
    calls = []

    @cuda.jit
    def inner(x):
        calls.append((x, cuda.threadIdx.x))

    @cuda.jit
    def outer(x):
        inner(x)

    outer[1, 3](5)
    assert sorted(calls) == [(5, 0), (5, 1), (5, 2)]


def test_canary_errors_come_out_with_thread_and_block():
    @cuda.jit
    def kernel(pointer):
        pointer[cuda.grid(1)]

    with pytest.raises(IndexError, match=r"tid=\[1, 0, 0\] ctaid=\[1, 0, 0\]: element 3 lies outside .* shape \(3,\)"):
        kernel[2, 2](Pointer(np.zeros(3)))


def test_every_kernel_can_be_made():
    tile, used = StatesTile(16, 16, 1), uses(mask_mod=Function.of("mask_mod", mods.causal))
    reads = uses(score_mod=Function.of("score_mod", lambda s, b, h, i, j, x: s * x[0]), aux=(("float32", 1),))
    spans = uses(cu_seqlens_q="int32", cu_seqlens_k="int32")
    appended = (("seqlens_k", "int32", 1), ("totals", "int32", 1))
    configs = [
        *[kind("float16", 8, 8, 16, 16) for kind in (V1Config, V2Config)],
        PagedConfig("float16", 8, 8, 16, 16),
        DecodeConfig("float16", 8, 8, 16, 16),
        AppendConfig("float16", appended, "own"),
        MmaConfig("float16", 8, 8, 16, 16),
        WgmmaConfig("float16", 8, 8, 64, 16),
        WgmmaFloat32Config("float32", 8, 8, 64, 32),
        DeltaConfig("float16", 8, False),
        DkdvConfig("float16", 8, 8, 16, 16),
        DqConfig("float16", 8, 8, 16, 16),
        DbiasConfig("float16", 8, 8, 16, 16, uses=uses(bias="float32")),
        DbiasSumConfig("float16", "float32"),
        HeadSumsConfig("float16", "dalibi_slopes", "float32", True),
        *[HeadSumsConfig("float16", "dsinks", "float32", True, of_blocks) for of_blocks in (False, True)],
        MmaDkdvConfig("float16", 8, 8, 16, 16),
        MmaDqConfig("float16", 8, 8, 16, 16),
        MmaOneKeyTileConfig("float16", 8, 8, 16, 16, stages=1),
        MmaDbiasConfig("float16", 8, 8, 32, 16, uses=uses(bias="float32")),
        MmaDauxConfig("float16", 8, 8, 32, 16, uses=reads),
        DauxConfig("float16", 8, 8, 16, 16, uses=reads),
        *[kind("float32", ("float32",), (0,)) for kind in (AuxStartConfig, AuxRoundConfig)],
        *[kind("float32", 8, 8, 16, 16) for kind in (MmaDkdvConfig, MmaDqConfig)],
        MmaFusedConfig("float64", 8, 8, 16, 32),
        MmaDqFinishConfig("float64", 8, 8, 16, 16),
        PreprocessConfig("float16", 8, has_dlse=False),
        WgmmaDkdvConfig("float16", 8, 8, 16, 64),
        WgmmaDqConfig("float16", 8, 8, 64, 16),
        WgmmaDkdvFloat32Config("float32", 8, 8, 32, 64),
        WgmmaDqFloat32Config("float32", 8, 8, 64, 32),
        WgmmaPairedDkdvConfig("float32", 136, 8, 32, 64, stages_a=1, stages_b=1),
        WgmmaPairedDqConfig("float32", 136, 8, 64, 32, stages_a=1, stages_b=1),
        WgmmaJoinConfig("float16", 8, 8, 64, 64, parts=2),
        WgmmaFusedConfig("float16", 8, 8, 64, 128),
        WgmmaRoundConfig("float16", 8, 8, 64, 128),
        WgmmaAddPartsConfig("float16", 8, 8, 64, 128),
        OutsideConfig("float16", (("dq", 8), ("dk", 8)), spans),
        *[MaskBitsConfig(of_keys=of_keys) for of_keys in (False, True)],
        BiasRowsConfig("float16"),
        *[
            kind(tile._replace(of_keys=of_keys), "float32", used)
            for kind in (TileStatesConfig, MaskModBitsConfig)
            for of_keys in (False, True)
        ],
        *[TileOrderConfig(tile._replace(of_keys=of_keys), of_mask=False) for of_keys in (False, True)],
        *[kind("float16", 32) for kind in SOFTMAX.values()],
    ]
    assert {config.kernel for config in configs} == set(modules())
    for config in configs:
        assert callable(source(config))


def test_a_tensor_core_tile_takes_seconds():
    """64 x 64 of head_dim 64: else nobody would step through it."""
    case = problem(64, 64, batch=1, heads=1, head_dim=64, dtype="float16")
    for kernel in (name for name, rung in RUNGS.items() if rung.tensor_cores):
        started = time.perf_counter()
        testing.check(case, numba_flash.attention(**case.arguments(), kernel=kernel), None, kernel)
        assert time.perf_counter() - started < 60


# How an array may lie: plain, gaps, backwards, repeated, one number, bool and bfloat16 as their bits.
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.arange(48.0).reshape(6, 8)[::2, ::2],
        np.arange(12.0).reshape(3, 4)[::-1, ::-1],
        np.arange(12.0).reshape(3, 4).T[::-1],
        np.broadcast_to(np.arange(4.0), (3, 4)),
        np.array(3.0),
        np.array([True, False]),
        testing.bfloat16([1.5, -2.0]),
    ],
)
def test_a_pointer_finds_every_element_by_its_strides(array):
    pointer = Pointer(array)
    bits = array.view({1: np.uint8, 2: np.uint16, 8: np.float64}[array.itemsize])
    for index in np.ndindex(array.shape):
        at = sum(i * s // array.itemsize for i, s in zip(index, array.strides, strict=True))
        assert pointer[at] == bits[index]
    assert repr(pointer).startswith(f"Pointer to {array.dtype} {array.shape}")


def test_a_pointer_checks_its_bounds():
    pointer = Pointer(np.arange(6.0)[::-2])  # elements 5, 3, 1
    assert [pointer[i] for i in (0, -2, -4)] == [5, 3, 1]
    for outside in (1, -5):
        with pytest.raises(IndexError, match=f"element {outside} lies outside"):
            pointer[outside]
        with pytest.raises(IndexError):
            pointer[outside] = 0
    with pytest.raises(IndexError):
        Pointer(np.empty((0, 3)))[0]


def test_a_write_through_a_pointer_is_seen_in_the_array():
    array = np.zeros((2, 3), np.float16)[:, ::-1]
    Pointer(array)[-1] = 7
    assert array[0, 1] == 7
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        Pointer(array)[0] = 1


# A launch that ends well and one that ends with an error.
@pytest.mark.parametrize("ends_well", [True, False])
def test_numbas_own_way_of_running_a_block_is_put_back(ends_well):
    from numba.cuda.simulator import kernel

    before = kernel.BlockManager, kernel.swapped_cuda_module, kernel.FakeCUDAKernel.__call__
    if ends_well:
        numba_flash.attention(**problem(2, 2, batch=1).arguments(), kernel="v2")
    else:
        with pytest.raises(ZeroDivisionError):
            launch.run(lambda: toolchain.cuda().jit(lambda: 1 / 0), 1, 1, 0, (), ())
    assert before == (kernel.BlockManager, kernel.swapped_cuda_module, kernel.FakeCUDAKernel.__call__)


@pytest.mark.parametrize("ends_well", [True, False])
def test_numbas_number_types_make_numpys_numbers_during_a_launch_and_put_back(ends_well, monkeypatch):
    """Of Numba's a kernel would make a number in ten times the time."""
    from numba import float64, types

    monkeypatch.setitem(globals(), "int16", types.int16)
    inside, real = [], float64

    def kernel():
        inside.append((type(int16(3)), type(real(3)), np.zeros(1, int16).dtype, np.zeros(1, real).dtype))  # noqa: F821
        inside.append((int16(np.int64(40000)), int16(np.float32(-1.7)), real(np.float32(0.5))))  # noqa: F821
        with pytest.raises(OverflowError):
            int16(40000)  # noqa: F821 - put there above
        assert ends_well

    if ends_well:
        launch.run(lambda: toolchain.cuda().jit(kernel), 1, 1, 0, (), ())
    else:
        with pytest.raises(AssertionError):
            launch.run(lambda: toolchain.cuda().jit(kernel), 1, 1, 0, (), ())
    assert inside == [(np.int16, np.float64, np.int16, np.float64), (40000 - 2**16, -1, 0.5)]
    assert globals()["int16"] is types.int16 and real is float64


def test_scalars_have_the_types_of_the_compiled_kernel():
    """int32 and a plain int are int32 to NumPy, int32 and int64 are int64 to both."""
    seen = []

    def kernel(number, numbers, x):
        seen.append([type(value) for value in (number, *numbers, x)])

    launch.run(lambda: toolchain.cuda().jit(kernel), 1, 1, 0, (), (1, (2, 2**40), 0.5))
    assert seen == [[np.int64] * 3 + [np.float64]]


def test_launches_of_two_threads_wait_for_each_other():
    cases = [problem(9, 17, batch=1, seed=seed) for seed in range(4)]
    results, errors = {}, []

    def run(number):
        try:
            results[number] = numba_flash.attention(**cases[number].arguments(), kernel="v2", return_lse=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for number, case in enumerate(cases):
        testing.check(case, *results[number])


def test_infinities_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numba_flash.attention(**problem(3, 5, batch=1, scale=1e38, size=100.0).arguments(), kernel="v2")


def test_a_problem_of_minutes_is_announced(monkeypatch):
    """At the caller's line, with the time; the launch itself is left out."""
    monkeypatch.setattr(launch, "run", lambda *arguments: None)
    huge = np.zeros((1, 8, 256, 64), np.float32)
    with pytest.warns(RuntimeWarning, match=r"about \d+ min in Numba's CUDA simulator.*kernel='cpu' is fast") as seen:
        numba_flash.attention(huge, huge, huge, kernel="v2")
    assert seen[0].filename == __file__
    small = huge[:, :1, :16]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        numba_flash.attention(small, small, small, kernel="v2")


def test_the_predicted_time_is_about_right():
    case = problem(40, 40, batch=1, head_dim=16)
    numba_flash.attention(**case.arguments(), kernel="v2")  # imports
    started = time.perf_counter()
    numba_flash.attention(**case.arguments(), kernel="v2")
    seconds = time.perf_counter() - started
    predicted = simulated_seconds(numba_flash.explain(**case.arguments()).problem)
    assert predicted / 10 < seconds < predicted * 10


def test_torch_tensors_are_refused_with_the_reason():
    torch = pytest.importorskip("torch", reason="needs torch")
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(
        NotImplementedError, match=r"simulator.*NumPy arrays only, and torch.*unset NUMBA_ENABLE_CUDASIM"
    ):
        numba_flash.attention(x, x, x)
    assert numba_flash.attention(x, x, x, kernel="cpu").shape == x.shape


# At the ends of what is kept in a table, 0 of either sign, and kinds that convert into each other with a loss.
NUMBERS = (0, 1, -1, True, 127, 128, 8191, 8192, -1024, -1025, 0.0, -0.0, 2.5, -7.75, *np.float32([-0.0, 3, 0.1]))
OF_NUMPY = (*NUMBERS, np.float16(0.5), np.int8(-3), np.int32(-1), np.uint32(2**32 - 1), np.int64(2**40 + 5))


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64])
def test_a_kernels_numbers_are_converted_as_by_numpy(kind):
    convert = numbers.converter(kind)
    for x in OF_NUMPY:
        with np.errstate(all="ignore"):
            try:
                expected = kind(x)
            except OverflowError:
                with pytest.raises(OverflowError):
                    convert(x)
                continue
            found = convert(x)
        assert type(found) is kind and found.tobytes() == expected.tobytes(), (x, found, expected)
