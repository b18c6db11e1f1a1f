"""Softmax in three passes, one thread per row: listing 1 of docs/algorithm.md ("safe softmax").

Source: equation 2 of docs/algorithm.md. e^x overflows float16 at x >= 11.1, float32 at 88.7 and float64 at 709.8, so
the row's maximum m is subtracted first.

Launch: grid (rows / threads, rounded up), block (config.threads). Each element is read three times.
"""

import math

from numba import cuda

from ..steps import elements


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)

    @cuda.jit
    def softmax_safe(arrays, strides, sizes):
        x, y, n = arrays.x, arrays.y, sizes.n
        row = cuda.grid(1)
        if row < sizes.rows:
            m = compute(-math.inf)  # lines 1 and 2
            for i in range(n):
                m = max(m, load(x, row * strides.x[0] + i * strides.x[1]))
            d = compute(0)  # lines 3 and 4
            for i in range(n):
                d += math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m)
            for i in range(n):  # line 5
                y_i = math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m) / d
                store(y, row * strides.y[0] + i * strides.y[1], y_i)

    return softmax_safe
