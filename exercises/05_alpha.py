"""The correction alpha: attention in one pass over tiles of keys

Teaches: equation 9, the heart of FlashAttention-2. When the maximum grows, l and O are multiplied by alpha.
Minutes: 15
Read: docs/algorithm.md, equations 9 and 10
Solution: numba_flash/kernels/simt/v2.py, lines 13 to 19 of listing 5 (docs/first_kernels.md)
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
    row = cuda.grid(1)  # a thread for each query
    s = cuda.local.array(TILE, float32)
    acc = cuda.local.array(DIM, float32)  # O: the sum of e^(s - m) * v so far, not divided yet
    for x in range(DIM):
        acc[x] = 0
    m = -math.inf
    l = 0.0  # the sum of e^(s - m) so far
    for j in range(k.shape[0] // TILE):
        m_new = m
        for y in range(TILE):
            s[y] = dot(q[row], k[j * TILE + y])
            m_new = max(m_new, s[y])
        alpha = ...  # turns what was measured from m into what is measured from m_new
        l = ...  # the sum of the tiles before
        for x in range(DIM):
            acc[x] = ...  # the output of the tiles before
        for y in range(TILE):
            p = ...  # the weight of key y of the tile
            l += p
            for x in range(DIM):
                acc[x] += p * v[j * TILE + y, x]
        m = m_new  # watch: row, j, m, m_new, alpha, l, acc
    for x in range(DIM):
        o[row, x] = ...  # the one division
