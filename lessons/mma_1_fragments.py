"""Tensor cores: the two products of a tile by mma.sync, 16 rows a warp, in float16.

New against `flash`: a warp multiplies 16 rows at once, and each lane holds fragments of the operands and of the result
(numba_flash/ptx/fragments.py). The softmax stays as it was, one thread for a row: so S and P go through shared memory.
Exponents are powers of 2, which are one instruction: scale has the factor log2(e).
"""

import math

from numba import cuda, float32, uint16, uint32

from lessons.launch import Lesson
from numba_flash.kernels.steps.basics import inlined
from numba_flash.ptx import approx, bar, cvt, local, memory, mma

HEAD_DIM, TILE_M, TILE_N, THREADS = 64, 64, 64, 128  # four warps of 16 queries
S_COUNT, O_COUNT = TILE_N // 2, HEAD_DIM // 2  # elements of a warp's S and O that a lane holds


@inlined
def load_tile(tile, source, first, count, thread):
    """tile <- `count` rows from element `first` on; zeros below them."""
    for i in range(thread, TILE_N * HEAD_DIM, THREADS):
        tile[i // HEAD_DIM, i % HEAD_DIM] = source[first + i] if i < count * HEAD_DIM else uint16(0)


@inlined
def pair(low, high):
    """Two 16-bit elements in one register."""
    return uint32(low) | (uint32(high) << uint32(16))


@inlined
def load_a(a, tile, row, column):
    """a <- (16, 16) of a tile, operand A: this lane's elements begin at (row, column)."""
    for i in range(4):
        y, x = row + 8 * (i % 2), column + 8 * (i // 2)
        a[i] = pair(tile[y, x], tile[y, x + 1])


@inlined
def multiply_q_k(s, q_smem, k_smem, warp, lane):
    """s (16, TILE_N) = the warp's rows of Q . K^T: the columns of operand B are rows of K."""
    a, b = local.array(4, uint32), local.array(2, uint32)
    for i in range(S_COUNT):
        s[i] = float32(0)
    for x in range(0, HEAD_DIM, 16):
        load_a(a, q_smem, 16 * warp + lane // 4, x + lane % 4 * 2)
        for n in range(TILE_N // 8):
            for i in range(2):
                key, dim = 8 * n + lane // 4, x + lane % 4 * 2 + 8 * i
                b[i] = pair(k_smem[key, dim], k_smem[key, dim + 1])
            mma.m16n8k16_f16(s, 4 * n, a, 0, b, 0)


@inlined
def multiply_p_v(o, p_smem, v_smem, warp, lane):
    """o (16, HEAD_DIM) += the warp's rows of P . V."""
    a, b = local.array(4, uint32), local.array(2, uint32)
    for y in range(0, TILE_N, 16):
        load_a(a, p_smem, 16 * warp + lane // 4, y + lane % 4 * 2)
        for n in range(HEAD_DIM // 8):
            for i in range(2):
                key, dim = y + lane % 4 * 2 + 8 * i, 8 * n + lane // 4
                b[i] = pair(v_smem[key, dim], v_smem[key + 1, dim])
            mma.m16n8k16_f16(o, 4 * n, a, 0, b, 0)


@cuda.jit
def flash_mma_1(q, k, v, o, queries, keys, scale):
    q_smem = cuda.shared.array((TILE_M, HEAD_DIM), uint16)
    k_smem = cuda.shared.array((TILE_N, HEAD_DIM), uint16)
    v_smem = cuda.shared.array((TILE_N, HEAD_DIM), uint16)
    s_smem = cuda.shared.array((TILE_M, TILE_N), float32)
    p_smem = cuda.shared.array((TILE_M, TILE_N), uint16)
    s, o_sum = local.array(S_COUNT, float32), local.array(O_COUNT, float32)

    thread = cuda.threadIdx.x
    warp, lane = thread // 32, thread % 32
    tiles = (queries + TILE_M - 1) // TILE_M
    head, first_row = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * TILE_M
    for i in range(O_COUNT):
        o_sum[i] = float32(0)
    m, l = float32(-math.inf), float32(0)  # of row `lane` of the warp's 16
    load_tile(q_smem, q, (head * queries + first_row) * HEAD_DIM, min(TILE_M, queries - first_row), thread)

    for j in range(0, keys, TILE_N):
        cuda.syncthreads()  # everyone is done with the tiles before
        load_tile(k_smem, k, (head * keys + j) * HEAD_DIM, min(TILE_N, keys - j), thread)
        load_tile(v_smem, v, (head * keys + j) * HEAD_DIM, min(TILE_N, keys - j), thread)
        cuda.syncthreads()
        multiply_q_k(s, q_smem, k_smem, warp, lane)
        for i in range(S_COUNT):  # element i of the lane's part of S
            row, column = 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2
            s_smem[row, column] = s[i] * scale if j + column < keys else float32(-math.inf)
        bar.warp_sync()
        if lane < 16:
            row, m_new, total = 16 * warp + lane, m, float32(0)
            for y in range(TILE_N):
                m_new = max(m_new, s_smem[row, y])
            alpha = approx.ex2(m - m_new)
            for y in range(0, TILE_N, 2):
                p0, p1 = approx.ex2(s_smem[row, y] - m_new), approx.ex2(s_smem[row, y + 1] - m_new)
                two = cvt.pack_f16x2(p0, p1)
                p_smem[row, y], p_smem[row, y + 1] = uint16(two & uint32(0xFFFF)), uint16(two >> uint32(16))
                total += p0 + p1
            m, l = m_new, l * alpha + total  # watch: row, j, m, m_new, alpha, l
            s_smem[row, 0], s_smem[row, 1] = alpha, l  # for the lanes that hold the row's part of O
        bar.warp_sync()
        for i in range(O_COUNT):
            o_sum[i] *= s_smem[16 * warp + lane // 4 + i % 4 // 2 * 8, 0]
        multiply_p_v(o_sum, p_smem, v_smem, warp, lane)

    for i in range(0, O_COUNT, 2):
        row, column = 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2
        if first_row + row < queries:
            l = s_smem[row, 1]
            to = memory.address(o, (head * queries + first_row + row) * HEAD_DIM + column)
            memory.store_b32(to, cvt.pack_f16x2(o_sum[i] / l, o_sum[i + 1] / l))


attention = Lesson(flash_mma_1, "float16", TILE_M, THREADS)
