"""Rows that see nothing

Teaches: under a causal mask a query may see no key of a tile, or none at all. -inf - -inf is NaN.
Minutes: 10
Read: docs/first_kernels.md, listing 5, lines 12 and 19
Solution: numba_flash/kernels/simt/v2.py, `if sees` and `if l != 0`
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
    """Causal: the last query sees all keys, and each query before it one key fewer. There may be more queries."""
    row = cuda.grid(1)
    s = cuda.local.array(TILE, float32)
    acc = cuda.local.array(DIM, float32)
    for x in range(DIM):
        acc[x] = 0
    m = -math.inf
    l = 0.0
    last = row + k.shape[0] - q.shape[0]  # the last key that the query sees; it may be negative
    for j in range(k.shape[0] // TILE):
        m_new = m
        for y in range(TILE):
            key = j * TILE + y
            s[y] = dot(q[row], k[key]) if key <= last else -math.inf
            m_new = max(m_new, s[y])
        if m_new > -math.inf:
            alpha = math.exp(m - m_new)
            l = alpha * l
            for x in range(DIM):
                acc[x] = alpha * acc[x]
            for y in range(TILE):
                p = math.exp(s[y] - m_new)
                l += p
                for x in range(DIM):
                    acc[x] += p * v[j * TILE + y, x]
            m = m_new  # watch: row, j, m, m_new, alpha, l, acc
    for x in range(DIM):
        o[row, x] = acc[x] / l if l != 0 else 0
