"""A device function that calls another one again and again (numba_flash/kernels/steps/repeated.py)."""

import numpy as np
import pytest
from numba import cuda

from numba_flash.kernels.steps.basics import inlined
from numba_flash.kernels.steps.repeated import repeated


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 16, 22])
def test_each_number_once_and_in_order(count):
    @inlined
    def step(n, found, calls):
        found[n] = 100 * n + calls[0]
        calls[0] += 1

    every = repeated(step, count)

    @cuda.jit
    def kernel(found, calls):
        every(found, calls)

    found, calls = np.zeros(32, np.int64), np.zeros(1, np.int64)
    kernel[1, 1](found, calls)
    assert (found[:count] == 101 * np.arange(count)).all() and not found[count:].any() and calls[0] == count
