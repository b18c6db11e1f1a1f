"""Bug hunt: a correction that corrects nothing

Teaches: the debugger. `scripts/exercise 18 --stop "alpha ="` opens pdb in a thread of the kernel; type `p m, m_new`,
    then `n`, then `p alpha`.
Minutes: 10
Read: docs/stepping.md
"""

import math

from numba import cuda, float32

TILE, DIM = 4, 4


@cuda.jit(device=True)
def dot(a, b):
    total = float32(0)
    for x in range(DIM):
        total += a[x] * b[x]
    return total


@cuda.jit
def attention(q, k, v, o):
    row = cuda.grid(1)
    s = cuda.local.array(TILE, float32)
    acc = cuda.local.array(DIM, float32)
    for x in range(DIM):
        acc[x] = 0
    m = dot(q[row], k[0])  # a score that exists: no -inf is needed
    l = 0.0
    for j in range(k.shape[0] // TILE):
        m_new = m
        for y in range(TILE):
            s[y] = dot(q[row], k[j * TILE + y])
            m_new = max(m_new, s[y])
        m = m_new
        alpha = math.exp(m - m_new)
        l = alpha * l
        for x in range(DIM):
            acc[x] = alpha * acc[x]
        for y in range(TILE):
            p = math.exp(s[y] - m)
            l += p
            for x in range(DIM):
                acc[x] += p * v[j * TILE + y, x]
    for x in range(DIM):
        o[row, x] = acc[x] / l
