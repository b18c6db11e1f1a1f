"""FlashAttention-2, one thread for each query: listing 5 of docs/first_kernels.md without options, in float32.

A block has a tile of queries. It walks over the tiles of keys, which all its threads load together. A thread keeps its
row of Q and of O, m and l in registers. The scores of a tile never leave shared memory.
"""

import math

from numba import cuda, float32

from lessons.launch import Lesson
from numba_flash.ptx import local

HEAD_DIM, TILE_M, TILE_N = 64, 64, 32
S_ROW = TILE_N + 1  # one more: so rows begin in different banks


@cuda.jit
def flash(q, k, v, o, queries, keys, scale):
    """o = softmax(scale * q . k^T) . v; arrays (heads, rows, HEAD_DIM), of which the kernel sees the addresses."""
    k_smem = cuda.shared.array((TILE_N, HEAD_DIM), float32)
    v_smem = cuda.shared.array((TILE_N, HEAD_DIM), float32)
    s_smem = cuda.shared.array((TILE_M, S_ROW), float32)
    q_row, o_row = local.array(HEAD_DIM, float32), local.array(HEAD_DIM, float32)

    thread = cuda.threadIdx.x
    tiles = (queries + TILE_M - 1) // TILE_M
    head, row = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * TILE_M + thread
    first, first_key = (head * queries + row) * HEAD_DIM, head * keys * HEAD_DIM
    for x in range(HEAD_DIM):
        q_row[x] = q[first + x] if row < queries else float32(0)
        o_row[x] = float32(0)
    m, l = float32(-math.inf), float32(0)

    for j in range(0, keys, TILE_N):
        count = min(TILE_N, keys - j)
        cuda.syncthreads()  # everyone is done with the tiles before
        for i in range(thread, count * HEAD_DIM, TILE_M):
            k_smem[i // HEAD_DIM, i % HEAD_DIM] = k[first_key + j * HEAD_DIM + i]
            v_smem[i // HEAD_DIM, i % HEAD_DIM] = v[first_key + j * HEAD_DIM + i]
        cuda.syncthreads()

        m_new = m
        for y in range(count):
            s = float32(0)
            for x in range(HEAD_DIM):
                s += q_row[x] * k_smem[y, x]
            s_smem[thread, y] = s * scale
            m_new = max(m_new, s * scale)
        alpha = math.exp(m - m_new)
        m, l = m_new, l * alpha  # watch: row, j, m, m_new, alpha, l
        for x in range(HEAD_DIM):
            o_row[x] *= alpha
        for y in range(count):
            p = math.exp(s_smem[thread, y] - m)
            l += p
            for x in range(HEAD_DIM):
                o_row[x] += p * v_smem[y, x]

    if row < queries:
        for x in range(HEAD_DIM):
            o[first + x] = o_row[x] / l


attention = Lesson(flash, "float32", TILE_M, threads=TILE_M)
