"""Weights in registers: what a lane holds of S is what it needs of P, so S and P never leave the registers.

New against `mma_3_cp_async`: the softmax on fragments. The four lanes of a quad hold a row between them. Two exchanges
give them its maximum; each keeps its own part of the sum, and only the end adds up the four parts. P is S rounded to 16
bits. Shared memory holds Q, K and V alone.
"""

import math

from numba import cuda, float32, uint8, uint32

from lessons.launch import Lesson
from numba_flash.kernels.steps.async_tiles import aligned
from numba_flash.kernels.steps.basics import inlined, panel_offset
from numba_flash.ptx import approx, cp_async, cvt, ldmatrix, local, memory, mma, shared, shfl

HEAD_DIM, TILE_M, TILE_N, THREADS = 64, 64, 64, 128  # four warps of 16 queries
S_COUNT, O_COUNT = TILE_N // 2, HEAD_DIM // 2  # elements of a warp's S and O that a lane holds
P_COUNT = S_COUNT // 2  # two in a register
TILE_BYTES = TILE_N * 128  # of each tile: Q, K and V
wait_all = cp_async.wait_group(0)  # for the thread's own copies; a barrier says that all threads' are there


@inlined
def load_tile(tile, source, count, thread):
    """Start to copy `count` rows from a global address to a tile, and zeros below them."""
    for i in range(thread, TILE_N * 8, THREADS):
        cp_async.copy16(tile + panel_offset(i // 8, i % 8, TILE_N), source + i * 16, 16 if i // 8 < count else 0)
    cp_async.commit_group()


@inlined
def multiply_q_k(s, q_smem, k_smem, warp, lane):
    """s (16, TILE_N) = the warp's rows of Q . K^T: the columns of operand B are rows of K."""
    a, b = local.array(4, uint32), local.array(4, uint32)
    for i in range(S_COUNT):
        s[i] = float32(0)
    for x in range(HEAD_DIM // 16):
        ldmatrix.x4(a, 0, q_smem + panel_offset(16 * warp + lane % 16, 2 * x + lane // 16, TILE_M))
        for n in range(TILE_N // 16):
            key = 16 * n + lane // 16 * 8 + lane % 8
            ldmatrix.x4(b, 0, k_smem + panel_offset(key, 2 * x + lane // 8 % 2, TILE_N))  # B of 16 keys
            mma.m16n8k16_f16(s, 8 * n, a, 0, b, 0)
            mma.m16n8k16_f16(s, 8 * n + 4, a, 0, b, 2)


@inlined
def softmax(s, p, m, l, alpha, first_key, keys, scale, lane):
    """p <- the weights of a tile; m, l <- with this tile; alpha <- the factor of what was summed before.

    m, l, alpha: of the two rows of which a lane has a part. p: operand A of P . V.
    """
    for i in range(S_COUNT):
        s[i] = s[i] * scale if first_key + i // 4 * 8 + lane % 4 * 2 + i % 2 < keys else float32(-math.inf)
    for r in range(2):
        m_new = m[r]
        for n in range(TILE_N // 8):
            m_new = max(m_new, max(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]))
        m_new = max(m_new, shfl.bfly_f32(m_new, 1))
        m_new = max(m_new, shfl.bfly_f32(m_new, 2))
        alpha[r] = approx.ex2(m[r] - m_new)
        m[r], l[r] = m_new, l[r] * alpha[r]  # watch: r, first_key, m, m_new, alpha, l
        for n in range(TILE_N // 8):
            p0, p1 = approx.ex2(s[4 * n + 2 * r] - m_new), approx.ex2(s[4 * n + 2 * r + 1] - m_new)
            p[2 * n + r] = cvt.pack_f16x2(p0, p1)
            l[r] += p0 + p1


@inlined
def multiply_p_v(o, p, v_smem, lane):
    """o (16, HEAD_DIM) += the warp's rows of P . V: operand B is V as it lies, so ldmatrix transposes it."""
    b = local.array(4, uint32)
    for y in range(TILE_N // 16):
        for n in range(HEAD_DIM // 16):
            ldmatrix.x4_trans(b, 0, v_smem + panel_offset(16 * y + lane % 16, 2 * n + lane // 16, TILE_N))
            mma.m16n8k16_f16(o, 8 * n, p, 4 * y, b, 0)
            mma.m16n8k16_f16(o, 8 * n + 4, p, 4 * y, b, 2)


@cuda.jit
def flash_mma_4(q, k, v, o, queries, keys, scale):
    q_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # as many bytes as the launch says
    k_smem, v_smem = q_smem + TILE_BYTES, q_smem + 2 * TILE_BYTES
    s, o_sum = local.array(S_COUNT, float32), local.array(O_COUNT, float32)
    p, alpha = local.array(P_COUNT, uint32), local.array(2, float32)
    m, l = local.array(2, float32), local.array(2, float32)

    thread = cuda.threadIdx.x
    warp, lane = thread // 32, thread % 32
    tiles = (queries + TILE_M - 1) // TILE_M
    head, first_row = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * TILE_M
    for i in range(O_COUNT):
        o_sum[i] = float32(0)
    for r in range(2):
        m[r], l[r] = float32(-math.inf), float32(0)
    q_global = memory.address(q, (head * queries + first_row) * HEAD_DIM)
    k_global, v_global = memory.address(k, head * keys * HEAD_DIM), memory.address(v, head * keys * HEAD_DIM)
    load_tile(q_smem, q_global, min(TILE_M, queries - first_row), thread)
    load_tile(k_smem, k_global, min(TILE_N, keys), thread)

    for j in range(0, keys, TILE_N):
        wait_all()
        cuda.syncthreads()  # K is there, and everyone is done with V of the tile before
        load_tile(v_smem, v_global + j * HEAD_DIM * 2, min(TILE_N, keys - j), thread)
        multiply_q_k(s, q_smem, k_smem, warp, lane)
        wait_all()
        cuda.syncthreads()  # V is there, and everyone is done with K
        if j + TILE_N < keys:
            load_tile(k_smem, k_global + (j + TILE_N) * HEAD_DIM * 2, min(TILE_N, keys - j - TILE_N), thread)
        softmax(s, p, m, l, alpha, j, keys, scale, lane)
        for i in range(O_COUNT):
            o_sum[i] *= alpha[i % 4 // 2]
        multiply_p_v(o_sum, p, v_smem, lane)

    for r in range(2):
        l[r] += shfl.bfly_f32(l[r], 1)
        l[r] += shfl.bfly_f32(l[r], 2)
    for i in range(0, O_COUNT, 2):
        row, column = 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2
        if first_row + row < queries:
            to = memory.address(o, (head * queries + first_row + row) * HEAD_DIM + column)
            memory.store_b32(to, cvt.pack_f16x2(o_sum[i] / l[i % 4 // 2], o_sum[i + 1] / l[i % 4 // 2]))


attention = Lesson(flash_mma_4, "float16", TILE_M, THREADS, shared_bytes=3 * TILE_BYTES + 1024)
