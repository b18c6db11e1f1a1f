"""Online softmax: one pass for the maximum and the sum

Teaches: how a sum is corrected when a larger maximum is found. All of FlashAttention rests on this step.
Minutes: 10
Read: docs/algorithm.md, equation 3 and listing 2
Solution: numba_flash/kernels/softmax/online.py
"""

import math

from numba import cuda


@cuda.jit
def softmax(x, y):
    row = cuda.grid(1)  # a thread for each row
    if row < x.shape[0]:
        m = x[row, 0]
        d = 1.0  # the sum of e^(x - m) so far
        for i in range(1, x.shape[1]):
            if x[row, i] > m:
                # The sum so far was made with the old m. What makes it a sum with the new one?
                d = ...
                m = x[row, i]
            else:
                d = ...
            # The next line is seen by the check, after each number.
            last = i  # watch: row, i, m, d
        for i in range(last + 1):
            y[row, i] = math.exp(x[row, i] - m) / d
