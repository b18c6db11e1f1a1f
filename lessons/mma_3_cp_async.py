"""cp.async: tiles arrive while the products of other tiles run.

New against `mma_2_ldmatrix`: a thread starts copies of 16 bytes and goes on. V of a tile is on its way during Q . K^T,
and the next tile's K during the softmax and P . V. So one wait and one barrier come before each product.
"""

import math

from numba import cuda, float32, uint8, uint32

from lessons.launch import Lesson
from numba_flash.kernels.steps.async_tiles import aligned
from numba_flash.kernels.steps.basics import inlined, panel_offset
from numba_flash.ptx import approx, bar, cp_async, cvt, ld_st, ldmatrix, local, memory, mma, shared

HEAD_DIM, TILE_M, TILE_N, THREADS = 64, 64, 64, 128  # four warps of 16 queries
S_COUNT, O_COUNT = TILE_N // 2, HEAD_DIM // 2  # elements of a warp's S and O that a lane holds
TILE_BYTES = TILE_N * 128  # of each tile: Q, K, V and P
wait_all = cp_async.wait_group(0)  # for the thread's own copies; a barrier says that all threads' are there


@inlined
def load_tile(tile, source, count, thread):
    """Start to copy `count` rows from a global address to a tile, and zeros below them."""
    for i in range(thread, TILE_N * 8, THREADS):
        cp_async.copy16(tile + panel_offset(i // 8, i % 8, TILE_N), source + i * 16, 16 if i // 8 < count else 0)
    cp_async.commit_group()


@inlined
def load_a(a, tile, step, warp, lane):
    """a <- the warp's 16 rows of a tile, 16 columns: operand A."""
    ldmatrix.x4(a, 0, tile + panel_offset(16 * warp + lane % 16, 2 * step + lane // 16, TILE_M))


@inlined
def multiply_q_k(s, q_smem, k_smem, warp, lane):
    """s (16, TILE_N) = the warp's rows of Q . K^T: the columns of operand B are rows of K."""
    a, b = local.array(4, uint32), local.array(4, uint32)
    for i in range(S_COUNT):
        s[i] = float32(0)
    for x in range(HEAD_DIM // 16):
        load_a(a, q_smem, x, warp, lane)
        for n in range(TILE_N // 16):
            key = 16 * n + lane // 16 * 8 + lane % 8
            ldmatrix.x4(b, 0, k_smem + panel_offset(key, 2 * x + lane // 8 % 2, TILE_N))  # B of 16 keys
            mma.m16n8k16_f16(s, 8 * n, a, 0, b, 0)
            mma.m16n8k16_f16(s, 8 * n + 4, a, 0, b, 2)


@inlined
def multiply_p_v(o, p_smem, v_smem, warp, lane):
    """o (16, HEAD_DIM) += the warp's rows of P . V: operand B is V as it lies, so ldmatrix transposes it."""
    a, b = local.array(4, uint32), local.array(4, uint32)
    for y in range(TILE_N // 16):
        load_a(a, p_smem, y, warp, lane)
        for n in range(HEAD_DIM // 16):
            ldmatrix.x4_trans(b, 0, v_smem + panel_offset(16 * y + lane % 16, 2 * n + lane // 16, TILE_N))
            mma.m16n8k16_f16(o, 8 * n, a, 0, b, 0)
            mma.m16n8k16_f16(o, 8 * n + 4, a, 0, b, 2)


@cuda.jit
def flash_mma_3(q, k, v, o, queries, keys, scale):
    q_smem = aligned(shared.address(cuda.shared.array(0, uint8)))  # as many bytes as the launch says
    k_smem, v_smem, p_smem = q_smem + TILE_BYTES, q_smem + 2 * TILE_BYTES, q_smem + 3 * TILE_BYTES
    s_smem = cuda.shared.array((TILE_M, TILE_N), float32)
    s, o_sum = local.array(S_COUNT, float32), local.array(O_COUNT, float32)

    thread = cuda.threadIdx.x
    warp, lane = thread // 32, thread % 32
    tiles = (queries + TILE_M - 1) // TILE_M
    head, first_row = cuda.blockIdx.x // tiles, cuda.blockIdx.x % tiles * TILE_M
    for i in range(O_COUNT):
        o_sum[i] = float32(0)
    m, l = float32(-math.inf), float32(0)  # of row `lane` of the warp's 16
    q_global = memory.address(q, (head * queries + first_row) * HEAD_DIM)
    k_global, v_global = memory.address(k, head * keys * HEAD_DIM), memory.address(v, head * keys * HEAD_DIM)
    load_tile(q_smem, q_global, min(TILE_M, queries - first_row), thread)
    load_tile(k_smem, k_global, min(TILE_N, keys), thread)

    for j in range(0, keys, TILE_N):
        wait_all()
        cuda.syncthreads()  # K is there, and everyone is done with V of the tile before
        load_tile(v_smem, v_global + j * HEAD_DIM * 2, min(TILE_N, keys - j), thread)
        multiply_q_k(s, q_smem, k_smem, warp, lane)
        for i in range(S_COUNT):  # element i of the lane's part of S
            row, column = 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2
            s_smem[row, column] = s[i] * scale if j + column < keys else float32(-math.inf)
        wait_all()
        cuda.syncthreads()  # V is there, and everyone is done with K; S is there, too
        if j + TILE_N < keys:
            load_tile(k_smem, k_global + (j + TILE_N) * HEAD_DIM * 2, min(TILE_N, keys - j - TILE_N), thread)
        if lane < 16:
            row, m_new, total = 16 * warp + lane, m, float32(0)
            for y in range(TILE_N):
                m_new = max(m_new, s_smem[row, y])
            alpha = approx.ex2(m - m_new)
            for y in range(0, TILE_N, 2):
                p0, p1 = approx.ex2(s_smem[row, y] - m_new), approx.ex2(s_smem[row, y + 1] - m_new)
                ld_st.store_b32(p_smem + panel_offset(row, y // 8, TILE_M) + y % 8 * 2, cvt.pack_f16x2(p0, p1))
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


attention = Lesson(flash_mma_3, "float16", TILE_M, THREADS, shared_bytes=4 * TILE_BYTES + 1024)
