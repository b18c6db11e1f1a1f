"""Softmax in two passes, one thread per row: maximum and sum in one, because the sum can be corrected.

Source: "flash attention from math to code", section 1, equations 1 and 2:

    for i: m_i = max(x_i, m_(i-1));  d_i = d_(i-1) * e^(m_(i-1) - m_i) + e^(x_i - m_i)      (1)
    for i: y_i = e^(x_i - m_N) / d_N                                                        (2)

Launch: grid (rows / threads, rounded up), block (config.threads). Each element is read twice.
"""

import math

from numba import cuda

from .steps import elements


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)

    @cuda.jit
    def softmax_online(arrays, strides, sizes):
        x, y, n = arrays.x, arrays.y, sizes.n
        row = cuda.grid(1)
        if row < sizes.rows:
            m = load(x, row * strides.x[0])  # equation 1 at i = 1, where m_0 = -inf and d_0 = 0
            d = compute(1)
            for i in range(1, n):
                x_i = load(x, row * strides.x[0] + i * strides.x[1])
                if x_i > m:
                    d = d * math.exp(m - x_i) + compute(1)
                    m = x_i
                elif x_i > compute(-math.inf):  # equal infinities have no difference
                    d += math.exp(x_i - m)
                elif x_i != x_i:
                    d = x_i  # NaN makes the row NaN
            for i in range(n):  # equation 2
                y_i = math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m) / d
                store(y, row * strides.y[0] + i * strides.y[1], y_i)

    return softmax_online
