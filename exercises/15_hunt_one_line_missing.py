"""Bug hunt: the result is a little wrong

Teaches: the trace. numba_flash.debug.watch records what a thread holds at each tile; the first number that is wrong
    tells which line is.
Minutes: 10
Read: docs/stepping.md, "A trace"
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
    m = -math.inf
    l = 0.0
    for j in range(k.shape[0] // TILE):
        m_new = m
        for y in range(TILE):
            s[y] = dot(q[row], k[j * TILE + y])
            m_new = max(m_new, s[y])
        alpha = math.exp(m - m_new)
        l = alpha * l
        for y in range(TILE):
            p = math.exp(s[y] - m_new)
            l += p
            for x in range(DIM):
                acc[x] += p * v[j * TILE + y, x]
        m = m_new  # watch: row, j, m, m_new, alpha, l, acc
    for x in range(DIM):
        o[row, x] = acc[x] / l
