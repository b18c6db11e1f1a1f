"""Hopper: TMA fetches whole tiles, a warpgroup of 128 threads multiplies them by wgmma, and mbarriers say when.

New against `mma_4_registers`: roles. One thread, the producer, asks TMA for tiles, which come swizzled without a thread
that copies. Four warps, the consumer, read them from shared memory as operands of wgmma: 64 queries and all keys of a
tile in one instruction a step. `full` ends a phase when a tile's bytes have come, `empty` when all consumers are done
with it. The lane's part of S and of O is as before, so the softmax is, too.
"""

import math

from numba import cuda, float32, int32, uint8, uint32

from lessons.launch import Lesson
from numba_flash.kernels.steps.async_tiles import aligned
from numba_flash.kernels.steps.basics import inlined
from numba_flash.ptx import approx, cvt, fence, local, mbarrier, memory, shared, shfl, special, tma, wgmma

HEAD_DIM, TILE_M, TILE_N = 64, 64, 128
CONSUMER, THREADS = 128, 128 + 32  # the producer is a thread of the last warp
S_COUNT, P_COUNT, O_COUNT = TILE_N // 2, TILE_N // 4, HEAD_DIM // 2  # registers of a lane
Q_BYTES, KV_BYTES = TILE_M * 128, TILE_N * 128  # of a tile
K_AT, V_AT = Q_BYTES, Q_BYTES + KV_BYTES  # in shared memory, behind Q
Q_FULL = V_AT + KV_BYTES  # mbarriers, 8 bytes each
FULL, EMPTY = Q_FULL + 8, Q_FULL + 16
SHARED_BYTES = Q_FULL + 24 + 1024  # the first tile begins at a multiple of 1024

# Steps of 16 in units of 16 bytes: along a row of 128 bytes, and along rows.
COLUMNS, ROWS = tuple(range(0, HEAD_DIM // 8, 2)), tuple(range(0, TILE_N * 8, 128))
multiply_q_k = wgmma.product_shared(TILE_N, "f16", COLUMNS, COLUMNS, 0)
multiply_p_v = wgmma.product_registers(HEAD_DIM, "f16", ROWS, 1)
describe, describe_v = wgmma.descriptor(16, 1024, 128), wgmma.descriptor(TILE_N * 128, 1024, 128)
wait_for_products, pin_s, pin_o = wgmma.wait_group(0), wgmma.pin(S_COUNT), wgmma.pin(O_COUNT)
maps = tma.parameter("lesson_flash_hopper_1")  # of Q, K and V, 128 bytes each


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
def produce(base, first_row, head, keys):
    """One thread: Q once, and each tile of K and V as soon as its place is empty."""
    mbarrier.arrive_expect_tx(base + Q_FULL, Q_BYTES)
    tma.load_3d(base, maps(), base + Q_FULL, 0, first_row, head)
    for n in range((keys + TILE_N - 1) // TILE_N):
        mbarrier.wait(base + EMPTY, (n & 1) ^ 1)
        mbarrier.arrive_expect_tx(base + FULL, 2 * KV_BYTES)
        tma.load_3d(base + K_AT, maps() + 128, base + FULL, 0, n * TILE_N, head)
        tma.load_3d(base + V_AT, maps() + 256, base + FULL, 0, n * TILE_N, head)


@inlined
def consume(base, o, first_row, head, queries, keys, scale):
    """128 threads: attention of 64 queries."""
    s, p, o_sum = local.array(S_COUNT, float32), local.array(P_COUNT, uint32), local.array(O_COUNT, float32)
    m, l, alpha = local.array(2, float32), local.array(2, float32), local.array(2, float32)
    thread = special.thread_index()
    warp, lane = thread // 32, thread % 32
    for i in range(O_COUNT):
        o_sum[i] = float32(0)
    for i in range(S_COUNT):
        s[i] = float32(0)
    for r in range(2):
        m[r], l[r] = float32(-math.inf), float32(0)

    mbarrier.wait(base + Q_FULL, 0)
    for n in range((keys + TILE_N - 1) // TILE_N):
        mbarrier.wait(base + FULL, n & 1)
        multiply_q_k(s, describe(base), describe(base + K_AT), 0)
        wgmma.commit_group()
        wait_for_products()
        pin_s(s)
        softmax(s, p, m, l, alpha, n * TILE_N, keys, scale, lane)
        for i in range(O_COUNT):
            o_sum[i] *= alpha[i % 4 // 2]
        multiply_p_v(o_sum, p, describe_v(base + V_AT), 1)
        wgmma.commit_group()
        wait_for_products()
        pin_o(o_sum)
        mbarrier.arrive(base + EMPTY)

    for r in range(2):
        l[r] += shfl.bfly_f32(l[r], 1)
        l[r] += shfl.bfly_f32(l[r], 2)
    for i in range(0, O_COUNT, 2):
        row, column = first_row + 16 * warp + lane // 4 + i % 4 // 2 * 8, i // 4 * 8 + lane % 4 * 2
        if row < queries:
            to = memory.address(o, (head * queries + row) * HEAD_DIM + column)
            memory.store_b32(to, cvt.pack_f16x2(o_sum[i] / l[i % 4 // 2], o_sum[i + 1] / l[i % 4 // 2]))


@cuda.jit
def flash_hopper_1(tensor_maps, q, k, v, o, queries, keys, scale):
    base = aligned(shared.address(cuda.shared.array(0, uint8)))
    thread = special.thread_index()
    tiles = (queries + TILE_M - 1) // TILE_M
    head, first_row = int32(cuda.blockIdx.x // tiles), int32(cuda.blockIdx.x % tiles * TILE_M)
    if thread == 0:
        mbarrier.init(base + Q_FULL, 1)
        mbarrier.init(base + FULL, 1)
        mbarrier.init(base + EMPTY, CONSUMER)
        fence.mbarrier_init()
    cuda.syncthreads()
    if thread < CONSUMER:
        consume(base, o, first_row, head, queries, keys, scale)
    elif thread == CONSUMER:
        produce(base, first_row, head, keys)


attention = Lesson(flash_hopper_1, "float16", TILE_M, THREADS, SHARED_BYTES, boxes=(TILE_M, TILE_N, TILE_N))
