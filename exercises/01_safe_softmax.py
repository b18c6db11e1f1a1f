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
            m = ...  # the largest number so far, of m and x[row, i]
        d = 0.0
        for i in range(x.shape[1]):
            d += ...  # equation 2: what a number adds to the sum
        for i in range(x.shape[1]):
            y[row, i] = ...  # equation 2: the weight of a number
