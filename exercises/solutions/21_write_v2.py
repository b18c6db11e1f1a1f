"""Write v2 from nothing

Teaches: everything before, put together: a block for each tile of queries, a thread for each query, K and V by way of
    shared memory, and one pass over the keys.
Minutes: 45
Read: docs/first_kernels.md, "FlashAttention-2"
Solution: numba_flash/kernels/simt/v2.py, which has all options
"""

import math

import numpy as np
from numba import cuda, float32

TILE, MOST = 16, 16  # queries of a block and keys of a tile; the largest head_dim
ROW = MOST + 1  # of a tile in shared memory: so rows begin in different banks


@cuda.jit(device=True)
def load(tile, source, first, thread):
    """The rows of source from `first` on, as many as there are."""
    for index in range(thread, TILE * source.shape[1], TILE):
        y, x = index // source.shape[1], index % source.shape[1]
        if first + y < source.shape[0]:
            tile[y, x] = source[first + y, x]


@cuda.jit
def flash(q, k, v, scale, ahead, o, lse):
    """Query i sees the keys up to i + ahead."""
    heads, tiles = q.shape[1], (q.shape[2] + TILE - 1) // TILE
    head, first_row = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * TILE
    b, h = head // heads, head % heads
    kv = h // (heads // k.shape[1])
    thread, i = cuda.threadIdx.x, first_row + cuda.threadIdx.x
    k_tile = cuda.shared.array((TILE, ROW), float32)
    v_tile = cuda.shared.array((TILE, ROW), float32)
    s, q_row, acc = cuda.local.array(TILE, float32), cuda.local.array(MOST, float32), cuda.local.array(MOST, float32)
    for x in range(q.shape[3]):
        q_row[x] = q[b, h, i, x] if i < q.shape[2] else 0
    for x in range(v.shape[3]):
        acc[x] = 0
    m, l = -math.inf, float32(0)

    end = min(k.shape[2], first_row + TILE + ahead)  # no query of the block sees more
    for first in range(0, end, TILE):
        cuda.syncthreads()  # everyone is done with the tile before
        load(k_tile, k[b, kv], first, thread)
        load(v_tile, v[b, kv], first, thread)
        cuda.syncthreads()  # the tile is there
        keys = min(TILE, k.shape[2] - first, i + ahead + 1 - first)  # of the tile that query i sees
        if i < q.shape[2] and keys > 0:
            m_new = m
            for y in range(keys):
                total = float32(0)
                for x in range(q.shape[3]):
                    total += q_row[x] * k_tile[y, x]
                s[y] = total * scale
                m_new = max(m_new, s[y])
            alpha = math.exp(m - m_new)
            l *= alpha
            for x in range(v.shape[3]):
                acc[x] *= alpha
            for y in range(keys):
                p = math.exp(s[y] - m_new)
                l += p
                for x in range(v.shape[3]):
                    acc[x] += p * v_tile[y, x]
            m = m_new  # watch: i, first, m, m_new, alpha, l

    if i < q.shape[2]:
        for x in range(v.shape[3]):
            o[b, h, i, x] = acc[x] / l if l != 0 else 0  # not l > 0: a NaN that is seen reaches o
        lse[b, h, i] = m + math.log(l) if l != 0 else -math.inf


def attention(q, k, v, causal=False):
    """(o, lse) of float32 arrays: what numba_flash.attention(q, k, v, causal=causal, return_lse=True) gives.

    q: (batch, heads, seqlen_q, head_dim); k, v: (batch, heads_kv, seqlen_k, head_dim or head_dim_v); o is like q with
    head_dim_v, lse (batch, heads, seqlen_q). Query head h reads head h // (heads // heads_kv) of k and v. Lengths may
    be any, 0 too. Causal: the last query sees the last key, and each query before it one key fewer. A query that sees
    no key has o = 0 and lse = -inf.
    """
    o, lse = np.empty((*q.shape[:3], v.shape[3]), q.dtype), np.empty(q.shape[:3], q.dtype)
    ahead = k.shape[2] - q.shape[2] if causal else k.shape[2]
    blocks = q.shape[0] * q.shape[1] * -(-q.shape[2] // TILE)
    if blocks:
        flash[blocks, TILE](q, k, v, q.shape[3] ** -0.5, ahead, o, lse)
    return o, lse
