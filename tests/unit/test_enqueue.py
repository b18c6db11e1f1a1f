"""Launching without a GPU: what the driver would be handed, by a driver that only writes it down."""

import concurrent.futures
import ctypes
import re
import struct
import types

import numpy as np
import pytest
from helpers import compiler

import numba_flash
from numba_flash.abi import tensor_maps
from numba_flash.abi.arguments import Values, values_of
from numba_flash.abi.parameters import Parameters
from numba_flash.abi.tensor_maps import TensorMap
from numba_flash.arrays import Array
from numba_flash.dispatch import launch
from numba_flash.gpu import compiled, launcher as enqueue
from numba_flash.machine.target import Target
from numba_flash.select.forward import select

driver = pytest.importorskip("cuda.bindings.driver", reason="needs numba-flash[cu13]")
KERNEL = types.SimpleNamespace(handle=0x1234)
OK = driver.CUresult.CUDA_SUCCESS


@pytest.fixture
def launches(monkeypatch):
    """What each launch was given: (function, grid, block, shared bytes, stream, parameters)."""
    seen = []

    def record(function, x, y, z, threads, threads_y, threads_z, shared_bytes, stream, parameters, extra):
        words = (ctypes.c_uint64 * 5).from_address(extra)
        assert (words[0], words[2], words[4], parameters) == (1, 2, 0, None)  # pointer, size, end
        size = ctypes.c_uint64.from_address(words[3]).value
        grid, block = (x, y, z), (threads, threads_y, threads_z)
        seen.append((int(function), grid, block, shared_bytes, int(stream), ctypes.string_at(words[1], size)))
        return (OK,)

    def record_with_attributes(config, function, parameters, extra):
        grid, block = ([getattr(config, f"{of}Dim{axis}") for axis in "XYZ"] for of in ("grid", "block"))
        record(function, *grid, *block, config.sharedMemBytes, config.hStream, parameters, extra)
        (attribute,) = config.attrs
        assert config.numAttrs == 1 and attribute.value.programmaticStreamSerializationAllowed == 1
        seen[-1] += (attribute.id.name,)
        return (OK,)

    monkeypatch.setattr(driver, "cuLaunchKernelEx", record_with_attributes)
    monkeypatch.setattr(driver, "cuLaunchKernel", record)
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (OK, 1))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (OK, 0))
    monkeypatch.setattr(driver, "cuKernelGetParamInfo", lambda kernel, index: (OK, 0, 8))
    return seen


def launcher(pointers=2, maps=(), scalars=(), device=0, behind=False):
    """(addresses, stream, blocks) -> None"""
    constants = enqueue.packed(scalars)
    made = enqueue.Launcher(KERNEL, "a_kernel", device, 64, 1024, pointers, len(maps), len(constants), behind)
    return lambda addresses, stream, blocks=7: made.launch(made.parameters(addresses, maps, constants), stream, blocks)


def test_parameters_lie_side_by_side(launches):
    launcher(scalars=(-3, 0.5, 2**40, np.float32(2)))([0x7F0000001000, 0], 99)
    expected = struct.pack("<QQqdqf", 0x7F0000001000, 0, -3, 0.5, 2**40, 2)
    assert launches == [(0x1234, (7, 1, 1), (64, 1, 1), 1024, 99, expected)]


def test_a_programmatic_launch_may_start_before_the_kernel_before_it_has_ended(launches, monkeypatch):
    monkeypatch.setattr(enqueue, "CONFIGS", 3)
    one, asked = launcher(behind=True), [(n % 4, 7 + n % 2) for n in range(9)]
    for stream, blocks in asked:
        one([stream, blocks], stream, blocks)
    early = "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"
    expected = [(0x1234, (n, 1, 1), (64, 1, 1), 1024, s or 1, struct.pack("<QQ", s, n), early) for s, n in asked]
    assert launches == expected


def test_the_null_stream_is_the_legacy_one_by_name(launches):
    launcher()([1, 2], 0)
    assert launches[0][4] == enqueue.LEGACY_DEFAULT_STREAM


def test_tensor_maps_come_first_each_of_its_operand(launches, monkeypatch):
    monkeypatch.setattr(enqueue, "encode", lambda tensor_map, pointer: struct.pack("<Q", pointer) * 16)
    tensor_map = TensorMap("float16", (64, 9), (128,), (64, 8))
    launcher(maps=((1, tensor_map), (0, tensor_map)), scalars=(5,))([16, 32], 3)
    parameters = launches[0][5]
    assert tensor_maps.SIZE == 128 and len(parameters) == 2 * 128 + 3 * 8
    assert struct.unpack("<16Q16QQQq", parameters) == (*[32] * 16, *[16] * 16, 16, 32, 5)


def test_threads_do_not_share_a_buffer(launches):
    enqueue_one = launcher(scalars=(1,))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: enqueue_one([n, n], n), range(1, 2001)))
    assert sorted(stream for *_, stream, _ in launches) == list(range(1, 2001))
    assert all(parameters == struct.pack("<QQq", stream, stream, 1) for *_, stream, parameters in launches)


@pytest.fixture
def config(monkeypatch):
    """Of a kernel that counts as compiled."""
    monkeypatch.setattr(launch, "compiled", lambda config, device, cc: KERNEL)
    monkeypatch.setattr(launch, "_loaded", launch._loaded.__wrapped__)  # a namespace cannot be a key
    return taking("x", "y")


def taking(*arrays, counted=False):
    """The facts of a kernel that takes these."""
    taken = Parameters((*arrays, *("counters",) * counted), sizes=("n",))
    return types.SimpleNamespace(
        kernel="one", threads=64, shared_bytes=1024, counted=counted, waits=False, parameters=taken
    )


def launch_of(config, n, device=0):
    values = Values.of(config, sizes=dict(n=n))
    counters = 5 if config.counted else 0
    return launch.kernel_launch(config, Target(False, device=device, cc=(9, 0)), 7, values, counters=counters)


def test_the_counter_of_the_stream_is_the_last_pointer(launches, config, monkeypatch):
    prepared = []
    monkeypatch.setattr(launch.tile_counters, "prepare", lambda *given: prepared.append(given))
    monkeypatch.setattr(launch.tile_counters, "counter", lambda device, stream, words: 1000 * device + stream)
    ready = launch_of(taking("x", "y", counted=True), 5, device=3)
    for stream in (8, 9, 8):
        ready.run([Array(16, None, None), None], stream)
    assert [parameters for *_, parameters in launches] == [
        struct.pack("<QQQq", 16, 0, 3000 + stream, 5) for stream in (8, 9, 8)
    ]
    assert prepared == [(3, 5)], "before the first launch, which may be captured"


def test_parameters_of_arrays_seen_before_are_not_made_again(launches, config, monkeypatch):
    made = []
    original = enqueue.Launcher.parameters
    monkeypatch.setattr(
        enqueue.Launcher, "parameters", lambda self, *given: made.append(given[0]) or original(self, *given)
    )
    ready = launch_of(config, 5)
    sets = [(16 * n, 0) for n in range(1, 2 * launch.PREPARED)]
    for first, _ in sets + sets[-3:]:
        ready.run([Array(first, None, None), None], 0)
    assert made == sets and len(ready._prepared) <= launch.PREPARED
    assert [parameters for *_, parameters in launches] == [
        struct.pack("<QQq", *addresses, 5) for addresses in sets + sets[-3:]
    ]


# Where another device is current, and where the thread has none at all.
@pytest.mark.parametrize(("current", "switches"), [((OK, 0), [1, 0]), ((driver.CUresult(201), None), [1])])
def test_the_arrays_device_is_made_current_for_the_launch(launches, monkeypatch, current, switches):
    seen = []
    device = lambda number: types.SimpleNamespace(set_current=lambda: seen.append(number))  # noqa: E731
    monkeypatch.setattr("cuda.core.Device", device)
    monkeypatch.setattr(driver, "cuDeviceGetCount", lambda: (OK, 2))
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: current)
    one = launcher(device=1)
    seen.clear()
    one([1, 2], 0)
    assert seen == switches and len(launches) == 1


# In a thread that has no context yet, which each of torch's backward is: to make ready what is launched, and to launch
# what another thread made ready.
@pytest.mark.parametrize("made_elsewhere", [False, True])
def test_the_only_device_is_made_current_when_nothing_is(launches, monkeypatch, made_elsewhere):
    seen, launch, no_context = [], driver.cuLaunchKernel, driver.CUresult.CUDA_ERROR_INVALID_CONTEXT
    device = types.SimpleNamespace(set_current=lambda: seen.append("current"))
    one = launcher() if made_elsewhere else None
    monkeypatch.setattr("cuda.core.Device", lambda number: device)
    monkeypatch.setattr(driver, "cuCtxGetDevice", lambda: (OK, 0) if seen else (no_context, None))
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *given: launch(*given) if seen else (no_context,))
    looked_up = lambda kernel, index: (OK, 0, 8) if seen else (no_context, None, None)  # noqa: E731
    monkeypatch.setattr(driver, "cuKernelGetParamInfo", looked_up)
    one = one or launcher()
    for n in (1, 2):
        one([1, 2], 0)
        assert seen == ["current"] and len(launches) == n


def test_a_refused_launch_says_what_was_asked_and_why(launches, monkeypatch):
    error = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *arguments: (error,))
    with pytest.raises(RuntimeError, match="'a_kernel'.*7 blocks of 64 threads.*1024 bytes.*CUDA_ERROR_INVALID_VALUE"):
        launcher()([1, 2], 0)


@compiler.needed
def test_what_is_packed_has_the_size_and_types_of_the_compiled_parameters():
    x = np.ones((1, 2, 3, 8), np.float32)
    problem = numba_flash.explain(x, x, x, softcap=2.0).problem
    config = select(problem, Target(False, cc=(9, 0), shared_bytes=2**17), "v2").config
    entry = re.search(r"\.entry.*?\)", compiled.to_ptx(config, (9, 0)), re.DOTALL)[0]
    pointers, numbers = len(config.parameters.arrays), values_of(config, problem).flat
    kinds = ["f32" if isinstance(number, np.float32) else "u64" for number in numbers]
    assert re.findall(r"\.param \.(\w+)", entry) == ["u64"] * pointers + kinds
    assert len(enqueue.packed(numbers)) == sum(4 if kind == "f32" else 8 for kind in kinds)


def test_a_sequence_hands_out_addresses_of_one_workspace(launches, config, monkeypatch):
    """Each kernel gets the addresses that it takes, 0 for what is not there, and the workspace is one allocation."""
    made = []

    def scratch(like, shape, dtype, stream):
        made.append((like, shape, dtype, stream))
        return Array(4096, None, None)

    monkeypatch.setattr(launch.arrays, "scratch", scratch)
    one, alone = launch_of(config, 5), launch_of(taking("x"), 6)
    steps = [launch.Step(one, (0, 2)), launch.Step(alone, (4,)), launch.Step(one, (1, 3))]
    sequence = launch.KernelSequence(steps, [((3,), "uint32"), None, ((2, 50), "float32")])
    q = Array(16, None, None)
    sequence.run([q, None], 9)
    sequence.start((16, 0), q, 9)
    expected = [struct.pack("<QQq", 16, 4096, 5), struct.pack("<Qq", 4096 + 256, 6), struct.pack("<QQq", 0, 0, 5)]
    assert [parameters for *_, parameters in launches] == 2 * expected
    assert made == 2 * [(q, (256 + 512,), "uint8", 9)]
    assert not any(len(found) > 6 for found in launches), "none may start early"
    assert sequence.by_addresses and not launch.KernelSequence([launch.Step(launch.Launch(), (0,))], []).by_addresses


def test_a_launch_takes_its_arrays_of_the_operands(launches, config):
    target, values = Target(False, device=0, cc=(9, 0)), Values.of(config, sizes=dict(n=5))
    ready = launch.kernel_launch(taking("x", "y", "z"), target, 7, values, taken=(2, 0, 3))
    for _ in range(2):  # its parameters are made once
        ready.run([Array(16, None, None), Array(32, None, None), Array(48, None, None)], 0)
    assert [parameters for *_, parameters in launches] == 2 * [struct.pack("<QQQq", 48, 16, 0, 5)]
