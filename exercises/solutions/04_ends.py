"""Lengths that are no multiple of a tile

Teaches: the three places where a tile can reach past the end: the number of tiles, a key, a query.
Minutes: 10
Read: docs/algorithm.md, the section "A tile of keys"
Solution: numba_flash/problem/ranges.py and numba_flash/kernels/score/mask.py (a key past the end has the score -inf)
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
    """softmax(q . k^T) . v with one maximum for all keys; 8 threads a block, and any number of queries and keys."""
    row = cuda.grid(1)
    tiles = (k.shape[0] + TILE - 1) // TILE
    if row < q.shape[0]:
        m = -math.inf
        for j in range(tiles):
            for y in range(TILE):
                key = j * TILE + y
                if key < k.shape[0]:
                    m = max(m, dot(q[row], k[key]))
        l = float32(0)
        for x in range(DIM):
            o[row, x] = 0
        for j in range(tiles):
            for y in range(TILE):
                key = j * TILE + y
                s = -math.inf
                if key < k.shape[0]:
                    s = dot(q[row], k[key])
                p = math.exp(s - m)
                l += p
                if p != 0:  # true of NaN, too: a NaN that is seen reaches o
                    for x in range(DIM):
                        o[row, x] += p * v[key, x]
        for x in range(DIM):
            o[row, x] /= l
