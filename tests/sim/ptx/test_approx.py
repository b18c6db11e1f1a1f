"""Approximations and the larger or smaller of two numbers."""

import numpy as np
from helpers.instructions import launch, wide
from numba import cuda

from numba_flash.ptx.sim import approx, minmax


def test_approx_maximum_and_minimum():
    x = np.array([0, -0.0, 1, -3.5, 100, -126.5, -200, np.inf, -np.inf, np.nan, 1e-40, 0.1, 130, 3, 5, 7], np.float32)
    results = np.zeros((7, 16), np.float32)

    def kernel(x, out):
        i = cuda.threadIdx.x
        out[i] = approx.ex2(x[i])
        out[16 + i] = approx.lg2(x[i])
        out[32 + i] = approx.rcp(x[i])
        out[48 + i] = minmax.maximum(x[i], 1.0)
        out[64 + i] = minmax.maximum(1.0, x[i])
        out[80 + i] = minmax.minimum_nan(x[i], 1.0)
        out[96 + i] = minmax.minimum_nan(1.0, x[i])

    launch(kernel, 16, x, results)
    with np.errstate(all="ignore"):
        flat = np.where(np.abs(x) < np.finfo(np.float32).tiny, x * 0, x).astype(np.float64)
        power = np.exp2(flat)
        power = np.where(power < np.finfo(np.float32).tiny, 0, power)
        larger, smaller = np.fmax(flat, 1), np.minimum(wide(x), 1)  # of a number and NaN: the number, and NaN
        expected = [power, np.log2(flat), 1 / flat, larger, larger, smaller, smaller]
        np.testing.assert_allclose(results, np.array(expected).astype(np.float32), rtol=3e-7)
