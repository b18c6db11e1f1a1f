"""Softmax in two passes, one thread per row: listing 2 of docs/algorithm.md. A larger maximum corrects the sum.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), algorithm 3; equations 3 and 4 of
docs/algorithm.md. m is the maximum so far, d the sum of e^(x - m) so far.

Launch: grid (rows / threads, rounded up), block (config.threads). Each element is read twice.
"""

import math

from numba import cuda

from ..steps import elements


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)

    @cuda.jit
    def softmax_online(arrays, strides, sizes):
        x, y, n = arrays.x, arrays.y, sizes.n
        row = cuda.grid(1)
        if row < sizes.rows:
            m = load(x, row * strides.x[0])  # line 1: equation 3 at the first element
            d = compute(1)
            for i in range(1, n):  # lines 2 to 4
                x_i = load(x, row * strides.x[0] + i * strides.x[1])
                if x_i > m:
                    d = d * math.exp(m - x_i) + compute(1)
                    m = x_i
                elif x_i > compute(-math.inf):  # equal infinities have no difference
                    d += math.exp(x_i - m)
                elif x_i != x_i:
                    d = x_i  # NaN makes the row NaN
            for i in range(n):  # line 5: equation 4
                y_i = math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m) / d
                store(y, row * strides.y[0] + i * strides.y[1], y_i)

    return softmax_online
