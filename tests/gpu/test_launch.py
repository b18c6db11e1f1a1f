"""What the driver makes of a launch: streams by number, devices, tensor maps, refusals; and warmup."""

import dataclasses

import numpy as np
import pytest
from contracts.forward import problem

import numba_flash
from numba_flash import testing
from numba_flash.abi.tensor_maps import TensorMap, fits
from numba_flash.dispatch import forward as dispatch, launch
from numba_flash.gpu import compiled
from numba_flash.gpu.launcher import Launcher
from numba_flash.gpu.tensor_maps import _behind_address, _encoded, encode


@pytest.fixture(scope="module")
def cupy():
    import cupy

    return cupy


def on_device(cupy, case):
    return [cupy.asarray(x) for x in (case.q, case.k, case.v)]


# The legacy default stream as a number and by name, and the one of this thread.
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_default_streams_by_number(cupy, stream):
    case = problem(40, 40)
    o = numba_flash.attention(*on_device(cupy, case), stream=stream)
    cupy.cuda.Device().synchronize()
    testing.check(case, o.get())


def test_the_arrays_device_need_not_be_the_current_one(cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    case = problem(40, 40)
    with cupy.cuda.Device(1):
        q, k, v = on_device(cupy, case)
    with cupy.cuda.Device(0):
        o = numba_flash.attention(q, k, v)
        assert cupy.cuda.runtime.getDevice() == 0 and o.device.id == 1
    testing.check(case, o.get())


def test_a_refused_launch_names_the_error(cupy):
    case = problem(40, 40)
    explained = numba_flash.explain(*on_device(cupy, case))
    config, target = explained.config, explained.target
    kernel = compiled.compiled(config, target.device, target.cc)
    launcher = Launcher(kernel, "a_kernel", target.device, config.threads, 10**8, 10, 0, 0)
    with pytest.raises(
        RuntimeError, match="'a_kernel' could not be launched.*100000000 bytes.*CUDA_ERROR_INVALID_VALUE"
    ):
        launcher.launch(launcher.parameters([0] * 10, (), b""), 0, 1)


def test_after_warmup_nothing_is_loaded(cupy, monkeypatch):
    case = problem(40, 40, head_dim=40)  # of no other test
    q, k, v = on_device(cupy, case)
    out = cupy.full_like(q, 7)
    dispatch._plans.clear()
    launch._loaded.cache_clear()
    compiled._kernels.clear()
    numba_flash.warmup(q, k, v, out=out)
    cupy.cuda.Device().synchronize()
    assert bool((out == 7).all())

    def load(*arguments):
        raise AssertionError("loaded again")

    monkeypatch.setattr(compiled, "_load", load)
    numba_flash.attention(q, k, v, out=out)
    testing.check(case, out.get())


PLAIN = TensorMap("float16", (64, 1000, 8, 2), (128, 128_000, 1_024_000), (64, 128, 1, 1))


# Plain; heads within the sequence; extents of one; overlapping rows; every swizzle and L2 size; 2 to 5 dimensions.
MAPS = [
    PLAIN,
    dataclasses.replace(PLAIN, strides_bytes=(1024, 128, 1_024_000)),
    dataclasses.replace(PLAIN, shape=(64, 1000, 1, 1), strides_bytes=(128, 0, 0)),
    dataclasses.replace(PLAIN, strides_bytes=(16, 128, 128)),
    *[dataclasses.replace(PLAIN, swizzle_bytes=n, box=(8, 256, 1, 1)) for n in (0, 32, 64, 128)],
    *[dataclasses.replace(PLAIN, l2_bytes=n, dtype="bfloat16") for n in (0, 64, 128, 256)],
    TensorMap("float16", (7, 1), (0,), (8, 1)),
    TensorMap("float16", (100, 2**31, 3, 2, 2), (208, 2**39, 2**38, 16), (64, 64, 1, 1, 1)),
]


@pytest.mark.parametrize("tensor_map", MAPS, ids=range(len(MAPS)))
def test_tensor_maps_that_fit_are_encoded_and_readdressed(cupy, tensor_map):
    if int(cupy.cuda.Device().compute_capability) < 90:
        pytest.skip("needs compute capability 9.0")
    assert fits(tensor_map) is None
    assert _behind_address(tensor_map) is not None, "the driver keeps the address elsewhere: every call encodes anew"
    memory = cupy.zeros(1024, cupy.uint8)
    for pointer in (memory.data.ptr, memory.data.ptr + 16, 0x7FFF_FFFF_FFF0):
        assert encode(tensor_map, pointer) == _encoded(tensor_map, pointer)
        assert np.frombuffer(encode(tensor_map, pointer), np.uint64)[0] == pointer
