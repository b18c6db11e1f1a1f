"""Gradients of keys and values, or of all at once, on tensor cores: mma.sync, ldmatrix, cp.async; since Ampere (sm_80).

Read mma_forward first. Here a block owns a tile of keys of one KV head and walks over the tiles of queries that see
it, of each query head of the group in turn, so that dK and dV are sums in registers: no atomics, and the same
bits in every run. A warp owns `warp_rows` keys. Scores are computed transposed,

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)     dP^T = V dO^T     dS^T = P^T * (dP^T - delta)

because what a lane then holds of P^T and dS^T is, rounded to 16 bits, what it must hold as the first operand of

    dV += P^T dO     dK += dS^T Q     and at the end dK *= scale

so neither leaves the registers. With `of_dq` dS^T also goes to shared memory, for dS . K, the share of the block's keys
in dQ, which is added to float32 sums in global memory. There the blocks of one head take turns, tile by tile, in the
order of their keys, so that sums have the same bits in every run; a block waits for none that began after it. That P
is recomputed from lse and that delta = rowsum(dO * O) carries the softmax's derivative is FlashAttention's (Dao et al.,
2022, section 3 and appendix B).

Letters as in v2, and acc_s, acc_dp, acc_dk, acc_dv float32 accumulators; tiles of Q and dO come by cp.async while the
products of the tile before run. lse and delta of a tile's queries lie beside them in shared memory.

`turns` has a word for each query tile of a head, the number of the block whose turn it is, and one that counts the
blocks that have begun; all are zero at first.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory.
Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dk and dv are contiguous.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from .. import ranges
from ..ptx import cp_async, cvt, fragments, ld_st, ldmatrix, memory, mma, shared, special
from .steps import async_tiles, elements, fragment_products, fragment_scores, gradient_rows, score_gradients, scores
from .steps import repair_keys as repair_keys_step
from .steps.integers import divide

key_queries = cuda.jit(device=True)(ranges.key_queries)
key_tiles = cuda.jit(device=True)(ranges.key_tiles)


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, depth, width = config.head_dim, config.head_dim_v, config.depth, config.width
    of_dk, of_dv, in_registers = config.of_dk, config.of_dv, config.in_registers
    _, v_at, q_at, do_at, ds_at, rows_at, number_at, _ = config.shared_offsets()
    dv_at = v_at if of_dk else 0  # where dV is staged
    alignment = config.ALIGNMENT
    q_stage, do_stage = (do_at - q_at) // 2, (ds_at - do_at) // 2  # bytes
    rows_stage, delta_at = 8 * tile_m, 4 * tile_m  # of lse and delta of a tile's queries
    strips, blocks, rows = warp_rows // 16, tile_m // 8, warp_rows // 8
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    dk_count, dv_count = strips * depth // 2 if of_dk else 1, strips * width // 2 if of_dv else 1
    k_count, v_count = strips * depth // 4, strips * width // 4 if of_dk else 1
    row_steps = -(-2 * tile_m // threads)  # values of lse and delta that a thread fetches
    has_softcap, has_alibi = config.softcap, config.alibi_dtype is not None
    of_dq, own_panel = config.of_dq, tile_n * 128
    dq_strips, dq_pairs, dq_tile = config.dq_rows // 16, config.dq_columns // 16, config.dq_tile
    dq_groups, steps = tile_m // config.dq_rows, depth // 16
    dq_count = dq_strips * dq_pairs * 8 if of_dq else 1

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_k, load_v = async_tiles.loader(tile_n, depth, threads), async_tiles.loader(tile_n, width, threads)
    load_q, load_do = async_tiles.loader(tile_m, depth, threads), async_tiles.loader(tile_m, width, threads)
    head, _ = scores.make(config)
    one_score, _, _, _ = fragment_scores.make(config, strips)
    weight, through_softcap = score_gradients.make(config, one_score)
    lanes_of, load_own, scores_product, gradient_product = fragment_products.make(config)
    load_k_frag, load_v_frag = load_own(depth), load_own(width)
    multiply_k_q, multiply_v_do = scores_product(depth), scores_product(width)
    multiply_p_do, multiply_ds_q = gradient_product(width), gradient_product(depth)
    stage_dk, store_dk = gradient_rows.make(config.dtype, tile_n, warp_rows, head_dim)
    stage_dv, store_dv = gradient_rows.make(config.dtype, tile_n, warp_rows, head_dim_v)
    repair_keys = repair_keys_step.make(config, weight, through_softcap)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    commit, wait_all = cp_async.commit_group, cp_async.wait_group(0)
    load_v4, load_b32, store_shared = ld_st.load_v4, ld_st.load_b32, ld_st.store_b32
    product = mma.m16n8k16_f16 if config.dtype == "float16" else mma.m16n8k16_bf16
    x4_trans, panel_offset, chunk_pair = ldmatrix.x4_trans, fragment_products.panel_offset, fragment_products.chunk_pair
    add_up, count_up, announce = memory.add_f32, memory.add, memory.exchange
    thread_index, block_index = special.thread_index, special.block_index
    address, shared_address = memory.address, shared.address
    first_row_of, first_column_of = cuda.jit(device=True)(fragments.row), cuda.jit(device=True)(fragments.column)
    log2_e, inf = float32(fragment_scores.LOG2_E), float32(math.inf)

    @cuda.jit(device=True, inline="always")
    def aligned(address):
        return (address + int32(alignment - 1)) & int32(-alignment)

    @cuda.jit(device=True, inline="always")
    def block_number(k_smem):
        """Which block this is: with dQ by the order in which blocks began, so that those that are waited for run."""
        return int32(load_b32(k_smem + number_at)) if of_dq else block_index()

    @cuda.jit(device=True, inline="always")
    def tile_of(block, batch, heads_kv, seqlen_k):
        """-> (b, h_kv, first_key). The first keys of a head come first: under a causal mask most queries see them.

        With dQ the first keys of all heads do, because blocks of one head wait for each other.
        """
        n_tiles = divide(int32(seqlen_k) + int32(tile_n - 1), tile_n)
        if of_dq:
            tile = divide(block, int32(batch) * int32(heads_kv))
            head_of_all = int32(block - tile * int32(batch) * int32(heads_kv))
        else:
            head_of_all = divide(block, n_tiles)
            tile = int32(block - head_of_all * n_tiles)
        b = divide(head_of_all, heads_kv)
        return b, int32(head_of_all - b * heads_kv), int32(tile * tile_n)

    @cuda.jit(device=True, inline="always")
    def fetch_rows(values, lse, delta, base, i, seqlen_q, thread):
        """values <- this thread's share of the lse in units of log2(e), and then of -delta, of query tile i.

        base: where the head's rows of lse and delta begin. A query that sees no key, or does not exist, has +inf for
        its lse: its weights are 0 then.
        """
        for step in range(row_steps):
            index = thread + step * threads
            value = float32(0)
            if index < tile_m:
                row = int64(i) * tile_m + index
                value = inf
                if row < seqlen_q:
                    value = float32(lse[base + row]) * log2_e
                    value = inf if value == -inf else value
            elif index < 2 * tile_m:
                row = int64(i) * tile_m + index - tile_m
                if row < seqlen_q:
                    value = -float32(delta[base + row])
            values[step] = value

    @cuda.jit(device=True, inline="always")
    def put_rows(values, rows_smem, thread):
        """To shared memory, so that the four columns that a lane has of every sixteen stand side by side."""
        for step in range(row_steps):
            index = thread + step * threads
            if index < 2 * tile_m:
                place = (index & int32(-16)) + ((index & 6) << 1) + ((index & 8) >> 2) + (index & 1)
                store_shared(rows_smem + 4 * place, float32(values[step]).view(np.uint32))

    @cuda.jit(device=True, inline="always")
    def start_dp(acc_dp, rows_smem, lane):
        """acc_dp <- -delta of each column, so that the product adds up to dP - delta."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks // 2):
            load_v4(four, 0, rows_smem + delta_at + n * 64 + ((lane & 3) << 4))
            for strip in range(strips):
                for half in range(2):
                    for i in range(4):
                        acc_dp[(strip * blocks + 2 * n + half) * 4 + i] = four[half * 2 + i % 2].view(np.float32)

    @cuda.jit(device=True, inline="always")
    def distance_of(i, thread, r, first_key, q_start):
        """q_pos - k_pos of the lane's key r and its first column of query tile i."""
        lane, warp = thread & int32(31), thread >> int32(5)
        key = first_key + warp * warp_rows + int32(first_row_of(lane)) + r * 8
        return float32(int64(i) * tile_m + int32(first_column_of(lane)) + q_start - key)

    @cuda.jit(device=True, inline="always")
    def limits(i, thread, first_key, keys, q_start, left, right, seqlen_q, first, end, distance):
        """The columns [first, end) of query tile i that see each of the lane's keys, from the lane's first column."""
        lane, warp = thread & int32(31), thread >> int32(5)
        first_column = int64(i) * tile_m + int32(first_column_of(lane))
        for r in range(rows):
            key = first_key + warp * warp_rows + int32(first_row_of(lane)) + r * 8
            first_query, end_query = key_queries(key, q_start, left, right, seqlen_q)
            distance[r] = distance_of(i, thread, r, first_key, q_start)
            if of_dq and key >= keys:
                end_query = first_query
            first[r] = int32(min(max(first_query - first_column, -8), tile_m))
            end[r] = int32(min(max(end_query - first_column, -8), tile_m))

    @cuda.jit(device=True, inline="always")
    def weigh(acc_s, acc_dp, p_frag, ds_frag, rows_smem, lane, slope, distance, first, end, scale, softcap, masked):
        """p_frag, ds_frag <- P^T and dS^T in 16 bits. masked, a constant: some columns do not see some keys."""
        four = cuda.local.array(4, uint32)
        p = cuda.local.array(2, float32)
        ds = cuda.local.array(2, float32)
        for n in range(blocks // 2):
            load_v4(four, 0, rows_smem + n * 64 + ((lane & 3) << 4))
            for r in range(rows):
                for half in range(2):
                    block = (r // 2) * blocks + 2 * n + half
                    at = block * 4 + (r % 2) * 2
                    for i in range(2):
                        column = int32((2 * n + half) * 8 + i)
                        lse_log2 = four[half * 2 + i].view(np.float32)
                        product = acc_s[at + i]
                        p[i] = weight(product, slope, distance[r] + float32(column), scale, softcap, lse_log2)
                        if masked and (column < first[r] or column >= end[r]):
                            p[i] = float32(0)
                        if of_dk:
                            ds[i] = p[i] * acc_dp[at + i]
                            if has_softcap:
                                ds[i] *= through_softcap(product, scale, softcap)
                            if masked and p[i] == 0:
                                ds[i] = float32(0)  # dP may be NaN there
                    if of_dv:
                        p_frag[block * 2 + r % 2] = pack(p[0], p[1])
                    if of_dk:
                        ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @cuda.jit(device=True, inline="always")
    def load_tile(i, h, odd, b, q, do, q_strides, do_strides, tiles, seqlen_q, thread):
        """Start the copies of Q and dO of query tile i of head h to stage `odd`."""
        row = int64(i) * tile_m
        rows_left = int32(min(seqlen_q - row, tile_m))
        q_base = b * q_strides[0] + h * q_strides[1] + row * q_strides[2]
        do_base = b * do_strides[0] + h * do_strides[1] + row * do_strides[2]
        q_bytes, do_bytes = 2 * q_strides[2], 2 * do_strides[2]
        load_q(tiles[0] + odd * q_stage, address(q, q_base), q_bytes, 0, rows_left, head_dim, thread)
        load_do(tiles[1] + odd * do_stage, address(do, do_base), do_bytes, 0, rows_left, head_dim_v, thread)

    @cuda.jit(device=True, inline="always")
    def following(i, members, begin, stop):
        """-> (i, members) of the next query tile: after the last one the first one again, of the next head."""
        last = i + 1 == stop
        return begin if last else int32(i + 1), int32(members - 1) if last else members

    @cuda.jit(device=True, inline="always")
    def turn(
        i, members, odd, begin, stop, values, q, do, lse, delta, q_strides, do_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, own, tiles,
    ):  # fmt: skip
        """Wait for the tile in stage `odd` and start the copies of the next one."""
        wait_all()
        cuda.syncthreads()  # tile i is there, and everyone is done with the one before
        next_i, next_members = following(i, members, begin, stop)
        if next_members > 0:
            thread = thread_index()
            b, h_kv, _ = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
            next_h = int32((h_kv + 1) * divide(heads, heads_kv) - next_members)
            load_tile(next_i, next_h, int32(odd ^ 1), b, q, do, q_strides, do_strides, tiles, seqlen_q, thread)
            fetch_rows(values, lse, delta, (b * heads + next_h) * seqlen_q, next_i, seqlen_q, thread)
        commit()

    @cuda.jit(device=True, inline="always")
    def scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles):
        """S^T and dP^T - delta of the query tile in stage `odd`."""
        # With the thread's number read anew, addresses are not worked out ahead of the loop and kept in registers.
        thread = thread_index()
        own_lane, other_lane, _ = lanes_of(thread)
        for x in range(s_count):
            acc_s[x] = float32(0)
        multiply_k_q(acc_s, k_frag, b_frag, own[0] + own_lane, tiles[0] + odd * q_stage + other_lane)
        if of_dk:
            start_dp(acc_dp, tiles[2] + odd * rows_stage, thread & int32(31))
            multiply_v_do(acc_dp, v_frag, b_frag, own[1] + own_lane, tiles[1] + odd * do_stage + other_lane)

    @cuda.jit(device=True, inline="always")
    def put_ds(ds_frag, ds_tile, thread):
        """dS^T (tile_n, tile_m) in 16 bits to shared memory, for everyone."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for r in range(rows):
            row = warp * warp_rows + int32(first_row_of(lane)) + r * 8
            for n in range(blocks):
                at = ds_tile + panel_offset(row, n, tile_n) + 2 * int32(first_column_of(lane))
                store_shared(at, ds_frag[((r // 2) * blocks + n) * 2 + r % 2])

    @cuda.jit(device=True, inline="always")
    def add_dq(
        i, members, prev_begin, prev_stop, acc_dq, a_frag, b_frag, ds_tile, own, dq_sums, turns,
        batch, heads, heads_kv, seqlen_q, seqlen_k,
    ):  # fmt: skip
        """The sums of tile i's dQ += dS . K, after the blocks of all keys before this one's have added theirs."""
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
        h = int32((h_kv + 1) * divide(heads, heads_kv) - members)
        m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
        tile = (int64(b) * heads + h) * m_tiles + i
        n, follows = divide(first_key, tile_n), i >= prev_begin and i < prev_stop
        if thread == 0 and follows:
            while count_up(address(turns, tile), uint32(0)) != uint32(n):
                pass
            cuda.threadfence()
        cuda.syncthreads()  # everyone's dS is there, and it is this block's turn
        strip, pair = int32(warp % dq_groups) * dq_strips, int32(warp // dq_groups) * dq_pairs
        a_lane = ds_tile + panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, tile_n)
        k_lane = own[0] + panel_offset(lane & 15, lane >> 4, tile_n)
        for x in range(dq_count):
            acc_dq[x] = float32(0)
        for y in range(tile_n // 16):
            for m in range(dq_strips):
                x4_trans(a_frag, 4 * m, chunk_pair(a_lane, strip + m, own_panel) + y * 2048)  # (16 queries, 16 keys)
            for x in range(dq_pairs):
                if pair + x < steps:
                    x4_trans(b_frag, 0, chunk_pair(k_lane, pair + x, own_panel) + y * 2048)  # (16 keys, 16)
                    for m in range(dq_strips):
                        product(acc_dq, (m * dq_pairs + x) * 8, a_frag, 4 * m, b_frag, 0)
                        product(acc_dq, (m * dq_pairs + x) * 8 + 4, a_frag, 4 * m, b_frag, 2)
        base = tile * dq_tile + thread
        if follows:
            for x in range(dq_count):
                add_up(address(dq_sums, base + x * threads), acc_dq[x])
        else:
            for x in range(dq_count):
                dq_sums[base + x * threads] = acc_dq[x]

    @cuda.jit(device=True, inline="always")
    def pass_on(i, members, turns, own, batch, heads, heads_kv, seqlen_q, seqlen_k):
        """After a barrier: the next block may add to tile i's dQ."""
        if thread_index() == 0:
            b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
            h = int32((h_kv + 1) * divide(heads, heads_kv) - members)
            m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
            cuda.threadfence()
            announce(address(turns, (int64(b) * heads + h) * m_tiles + i), uint32(divide(first_key, tile_n) + 1))

    @cuda.jit(device=True, inline="always")
    def gradients_of_tile(
        odd, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, b_frag, ds_tile, tiles, slope, distance, first, end,
        scale, softcap, masked,
    ):  # fmt: skip
        """dK and dV += what the query tile in stage `odd` gives."""
        thread = thread_index()
        rows_tile, lane = tiles[2] + odd * rows_stage, thread & int32(31)
        weigh(acc_s, acc_dp, p_frag, ds_frag, rows_tile, lane, slope, distance, first, end, scale, softcap, masked)
        _, _, other_transposed = lanes_of(thread)
        if of_dq:
            put_ds(ds_frag, ds_tile, thread)
        if of_dv:
            multiply_p_do(acc_dv, p_frag, b_frag, tiles[1] + odd * do_stage + other_transposed)
        if of_dk:
            multiply_ds_q(acc_dk, ds_frag, b_frag, tiles[0] + odd * q_stage + other_transposed)

    @cuda.jit(device=True, inline="always")
    def work(inputs, dk, dv, dq_sums, turns, strides, sizes, scale_, softcap_):
        q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets = inputs
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides = strides
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset = sizes
        scale, softcap = float32(scale_), float32(softcap_)
        thread = thread_index()
        smem = cuda.shared.array(0, uint8)
        k_smem = aligned(shared_address(smem))  # (tile_n, depth)
        own = (k_smem, k_smem + int32(v_at))  # K and V (tile_n, width)
        # Two stages each of Q (tile_m, depth), dO (tile_m, width), and lse and -delta (tile_m,).
        tiles = (k_smem + int32(q_at), k_smem + int32(do_at), k_smem + int32(rows_at))
        ds_tile = k_smem + int32(ds_at)  # (tile_n, tile_m)
        if of_dq:
            m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
            if thread == 0:
                store_shared(k_smem + number_at, count_up(address(turns, batch * heads * m_tiles), uint32(1)))
            cuda.syncthreads()
        b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        keys_left = int32(min(keys - first_key, tile_n))  # may be below 0

        acc_s = cuda.local.array(s_count, float32)  # (strips, tile_m / 8, 4)
        acc_dp = cuda.local.array(s_count, float32)  # (strips, tile_m / 8, 4)
        acc_dk = cuda.local.array(dk_count, float32)  # (strips, depth / 8, 4)
        acc_dv = cuda.local.array(dv_count, float32)  # (strips, width / 8, 4)
        p_frag = cuda.local.array(frag_count, uint32)  # (strips, tile_m / 8, 2)
        ds_frag = cuda.local.array(frag_count, uint32)  # (strips, tile_m / 8, 2)
        k_frag = cuda.local.array(k_count, uint32)  # (strips, depth / 16, 4)
        v_frag = cuda.local.array(v_count, uint32)  # (strips, width / 16, 4)
        b_frag = cuda.local.array(4, uint32)  # (16, 16) of Q or dO
        acc_dq = cuda.local.array(dq_count, float32)
        a_frag = cuda.local.array(8, uint32)
        values = cuda.local.array(row_steps, float32)
        first = cuda.local.array(rows, int32)
        end = cuda.local.array(rows, int32)
        distance = cuda.local.array(rows, float32)
        for x in range(dk_count):
            acc_dk[x] = float32(0)
        for x in range(dv_count):
            acc_dv[x] = float32(0)

        top_first, top_end = key_queries(first_key, q_start, left, right, seqlen_q)
        bottom_first, bottom_end = key_queries(first_key + keys_left - 1, q_start, left, right, seqlen_q)
        begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        prev_begin, prev_stop = int32(0), int32(0)  # the query tiles that the block of the keys before this one's sees
        if of_dq:
            if keys_left < tile_n:  # keys that do not exist have weights, which dQ must not see
                free, cut = stop, stop
            if first_key > 0:
                top_first, top_end = key_queries(first_key - tile_n, q_start, left, right, seqlen_q)
                bottom_first, bottom_end = key_queries(first_key - 1, q_start, left, right, seqlen_q)
                begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
                prev_begin, prev_stop = int32(begin_), int32(stop_)

        # odd: which stage is in use; members: heads of the group that are left.
        i, odd, members = begin, int32(0), int32(0)
        slope = float32(0)
        if begin < stop and keys_left > 0:
            members = divide(heads, heads_kv)
            k_base = b * k_strides[0] + h_kv * k_strides[1] + first_key * k_strides[2]
            load_k(own[0], address(k, k_base), 2 * k_strides[2], 0, keys_left, head_dim, thread)
            if of_dk:
                v_base = b * v_strides[0] + h_kv * v_strides[1] + first_key * v_strides[2]
                load_v(own[1], address(v, v_base), 2 * v_strides[2], 0, keys_left, head_dim_v, thread)
            h = int32(h_kv * members)
            load_tile(i, h, odd, b, q, do, q_strides, do_strides, tiles, seqlen_q, thread)
            fetch_rows(values, lse, delta, (b * heads + h) * seqlen_q, i, seqlen_q, thread)
            put_rows(values, tiles[2], thread)
        commit()
        if in_registers:
            wait_all()
            cuda.syncthreads()
            own_lane, _, _ = lanes_of(thread)
            load_k_frag(k_frag, own[0] + own_lane)
            if of_dk:
                load_v_frag(v_frag, own[1] + own_lane)

        while members > 0:
            # Tiles of which some query does not see some key; then those that are seen whole; then, behind a left
            # window, some of the first kind again; and all this for each head of the group.
            while members > 0 and (i < free or i >= cut):
                turn(
                    i, members, odd, begin, stop, values, q, do, lse, delta, q_strides, do_strides,
                    batch, heads, heads_kv, seqlen_q, seqlen_k, own, tiles,
                )  # fmt: skip
                scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles)
                # Worked out again: kept through the loop, it would cost the registers that S needs.
                now = thread_index()
                b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
                keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
                limits(i, now, first_key, keys, q_start, left, right, seqlen_q, first, end, distance)
                if has_alibi:
                    h = (h_kv + 1) * divide(heads, heads_kv) - members
                    slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
                gradients_of_tile(
                    odd, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, b_frag, ds_tile, tiles, slope, distance,
                    first, end,
                    scale, softcap, True,
                )  # fmt: skip
                if of_dq:
                    add_dq(
                        i, members, prev_begin, prev_stop, acc_dq, a_frag, b_frag, ds_tile, own, dq_sums, turns,
                        batch, heads, heads_kv, seqlen_q, seqlen_k,
                    )  # fmt: skip
                    cuda.syncthreads()
                    pass_on(i, members, turns, own, batch, heads, heads_kv, seqlen_q, seqlen_k)
                odd = int32(odd ^ 1)
                put_rows(values, tiles[2] + odd * rows_stage, thread_index())
                i, members = following(i, members, begin, stop)
            while members > 0 and i >= free and i < cut:
                turn(
                    i, members, odd, begin, stop, values, q, do, lse, delta, q_strides, do_strides,
                    batch, heads, heads_kv, seqlen_q, seqlen_k, own, tiles,
                )  # fmt: skip
                scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles)
                if has_alibi:
                    now = thread_index()
                    b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
                    _, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
                    h = (h_kv + 1) * divide(heads, heads_kv) - members
                    slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
                    for r in range(rows):
                        distance[r] = distance_of(i, now, r, first_key, q_start)
                gradients_of_tile(
                    odd, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, b_frag, ds_tile, tiles, slope, distance,
                    first, end,
                    scale, softcap, False,
                )  # fmt: skip
                if of_dq:
                    add_dq(
                        i, members, prev_begin, prev_stop, acc_dq, a_frag, b_frag, ds_tile, own, dq_sums, turns,
                        batch, heads, heads_kv, seqlen_q, seqlen_k,
                    )  # fmt: skip
                    cuda.syncthreads()
                    pass_on(i, members, turns, own, batch, heads, heads_kv, seqlen_q, seqlen_k)
                odd = int32(odd ^ 1)
                put_rows(values, tiles[2] + odd * rows_stage, thread_index())
                i, members = following(i, members, begin, stop)

        # dK and dV to the place of the warp's own rows of K and V, and from there to global memory.
        wait_all()
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        first_row = int32(warp * warp_rows)
        b, h_kv, first_key = tile_of(block_number(own[0]), batch, heads_kv, seqlen_k)
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        keys_left = int32(min(keys - first_key, tile_n))
        rows_left = int32(min(seqlen_k - first_key, tile_n))
        suspects = uint32(0)
        if of_dk:
            suspects |= stage_dk(acc_dk, scale, own[0], first_row, lane, keys_left)
        if of_dv:
            suspects |= stage_dv(acc_dv, float32(1), k_smem + int32(dv_at), first_row, lane, keys_left)
        if of_dk:
            base = b * dk_strides[0] + h_kv * dk_strides[1] + first_key * dk_strides[2]
            store_dk(own[0], first_row, lane, dk, base, dk_strides[2], rows_left, suspects)
        if of_dv:
            base = b * dv_strides[0] + h_kv * dv_strides[1] + first_key * dv_strides[2]
            store_dv(k_smem + int32(dv_at), first_row, lane, dv, base, dv_strides[2], rows_left, suspects)
        if suspects != 0:
            repair_keys(
                suspects, first_row, lane, (q, k, v, do), (q_strides, k_strides, v_strides, do_strides),
                (dk, dv), (dk_strides, dv_strides), lse, delta, alibi_slopes, alibi_strides,
                b, heads, heads_kv, h_kv, first_key, q_start, seqlen_q, left, right, scale, softcap,
            )  # fmt: skip

    @cuda.jit
    def flash_attention_mma_dkdv(
        q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets, dk, dv,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale, softcap,
    ):  # fmt: skip
        inputs = (q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets)
        strides = (q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides)
        sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset)
        work(inputs, dk, dv, lse, seqlens_k, strides, sizes, scale, softcap)

    @cuda.jit
    def flash_attention_mma_backward(
        q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets, dk, dv, dq_sums, turns,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale, softcap,
    ):  # fmt: skip
        inputs = (q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets)
        strides = (q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides)
        sizes = (batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset)
        work(inputs, dk, dv, dq_sums, turns, strides, sizes, scale, softcap)

    return flash_attention_mma_backward if of_dq else flash_attention_mma_dkdv
