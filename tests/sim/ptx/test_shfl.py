"""Shuffles between the lanes of a warp."""

import numpy as np
import pytest
from helpers.instructions import lanes, launch, rng
from numba import cuda

from numba_flash.ptx.sim import ld_st, local, memory, minmax, shared, shfl


def test_shfl():
    def kernel(out, others, floats):
        i = cuda.threadIdx.x
        out[i] = shfl.bfly_b32(i * 3, 5)
        others[i] = shfl.idx_b32(i * 3, 31 - i)
        floats[i] = shfl.idx_f32(shfl.bfly_f32(i / 2, 16), i ^ 1)

    out, others, floats = np.zeros(64, np.uint32), np.zeros(64, np.uint32), np.zeros(64, np.float32)
    launch(kernel, 64, out, others, floats)
    i = np.arange(64)
    np.testing.assert_array_equal(out, (i ^ 5) * 3)
    np.testing.assert_array_equal(others, (i // 32 * 32 + 31 - i % 32) * 3)
    np.testing.assert_array_equal(floats, (i ^ 17) / 2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_sum_of_a_warp_has_the_bits_of_five_butterflies(dtype):
    generator, single = np.random.default_rng(3), dtype is np.float32
    x = (generator.standard_normal(64) * 10.0 ** generator.integers(-6, 6, 64)).astype(dtype)
    x[40] = np.inf

    def kernel(x, sums, steps):
        i = cuda.threadIdx.x
        own = x[i]
        sums[i] = shfl.sum_f32(own) if single else shfl.sum_f64(own)
        for distance in (1, 2, 4, 8, 16):
            own += shfl.bfly_f32(own, distance) if single else shfl.bfly_f64(own, distance)
        steps[i] = own

    sums, steps = np.zeros(64, dtype), np.zeros(64, dtype)
    launch(kernel, 64, x, sums, steps)
    np.testing.assert_array_equal(sums, steps)
    assert np.isfinite(sums[:32]).all() and np.isinf(sums[32:]).all() and len(set(sums.tolist())) == 2


def test_lanes_that_are_not_there_give_nothing():
    def kernel(out):
        out[cuda.threadIdx.x] = shfl.bfly_b32(cuda.threadIdx.x * 3, 33 if cuda.threadIdx.x else 0)

    np.testing.assert_array_equal(lanes(kernel), 3 * np.arange(32))


def test_float64_between_lanes_and_in_memory():
    x = rng.standard_normal(64)

    def kernel(x, out):
        i = cuda.threadIdx.x
        smem = cuda.shared.array(0, np.dtype(np.float64))
        values = local.array(3, np.dtype(np.float64))
        smem[2 * i], smem[2 * i + 1] = x[2 * i], x[2 * i + 1]
        ld_st.load_v2_f64(values, 1, shared.address(smem) + 16 * i)
        values[1] = shfl.bfly_f64(shfl.idx_f64(values[1], i ^ 2), 3)
        values[2] = minmax.maximum_f64(values[2], 0.5)
        memory.store_v2_f64(memory.address(out, 2 * i), values, 1)

    out = np.zeros(64)
    launch(kernel, 32, x, out, shared_bytes=512)
    np.testing.assert_array_equal(out[0::2], x[0::2][np.arange(32) ^ 1])
    np.testing.assert_array_equal(out[1::2], np.maximum(x[1::2], 0.5))
