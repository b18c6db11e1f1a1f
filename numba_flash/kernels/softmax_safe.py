"""Softmax in three passes, one thread per row: the "safe softmax" that everything starts from.

Source: the seeds' section on online softmax ("safe softmax": three loops). e^x overflows float16 at
x >= 11.1, float32 at 88.7 and float64 at 709.8, so the row's maximum m is subtracted first:

    for i: m = max(m, x_i)        for i: d = d + e^(x_i - m)        for i: y_i = e^(x_i - m) / d

Launch: grid (rows / threads, rounded up), block (config.threads). Each element is read three times.
"""

import math

from numba import cuda

from .steps import elements


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)

    @cuda.jit
    def softmax_safe(arrays, strides, sizes):
        x, y, n = arrays.x, arrays.y, sizes.n
        row = cuda.grid(1)
        if row < sizes.rows:
            m = compute(-math.inf)
            for i in range(n):
                m = max(m, load(x, row * strides.x[0] + i * strides.x[1]))
            d = compute(0)
            for i in range(n):
                d += math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m)
            for i in range(n):
                y_i = math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m) / d
                store(y, row * strides.y[0] + i * strides.y[1], y_i)

    return softmax_safe
