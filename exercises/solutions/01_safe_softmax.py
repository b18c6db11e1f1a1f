"""Safe softmax

Teaches: why the maximum is subtracted before e^x: no number may overflow, and the result stays the same.
Minutes: 5
Read: docs/algorithm.md, equation 2 and listing 1
Solution: numba_flash/kernels/softmax/safe.py
"""

import math

from numba import cuda


@cuda.jit
def softmax(x, y):
    row = cuda.grid(1)  # a thread for each row
    if row < x.shape[0]:
        m = -math.inf
        for i in range(x.shape[1]):
            m = max(m, x[row, i])
        d = 0.0
        for i in range(x.shape[1]):
            d += math.exp(x[row, i] - m)
        for i in range(x.shape[1]):
            y[row, i] = math.exp(x[row, i] - m) / d
