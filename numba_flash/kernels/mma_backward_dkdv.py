"""Gradients of keys and values on tensor cores: mma.sync, ldmatrix, cp.async; since Ampere (sm_80).

Read mma_forward first. Here a block owns a tile of keys of one KV head and walks over the tiles of queries that see
it, of each query head of the group in turn, so that dK and dV are sums in registers: no atomics, and the same
bits in every run. A warp owns `warp_rows` keys. Scores are computed transposed,

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)     dP^T = V dO^T     dS^T = P^T * (dP^T - delta)

because what a lane then holds of P^T and dS^T is, rounded to 16 bits, what it must hold as the first operand of

    dV += P^T dO     dK += dS^T Q     and at the end dK *= scale

so neither leaves the registers. With `column_groups`, where the sums of whole rows would not fit into registers,
several warps own the same keys: each computes P^T and dS^T for its part of the queries, they exchange them in shared
memory, and each sums up some panels of 64 columns of dK and of dV.

A tile of queries has two halves, Q, and dO with lse and delta of its rows. With two stages both come while the
products of the tile before run. With one stage there is room for twice as many queries, and so each element of K and V
that a warp reads from shared memory is used twice as often; the halves then take turns: while dK is summed up from Q,
the next dO comes, and while dP is computed from it, the next Q. So dP is the first product of a tile then, and S the
second.

That P is recomputed from lse and that delta = rowsum(dO * O) carries the softmax's
derivative is FlashAttention's (Dao et al., 2022, section 3 and appendix B).

Letters as in v2, and acc_s, acc_dp, acc_dk, acc_dv float32 accumulators; lse and -delta as steps/row_facts.py has them.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory.
Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dk and dv are contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ..ptx import bar, cp_async, cvt, ld_st, memory, shared, special
from .steps import (
    async_tiles,
    elements,
    fragment_products,
    fragment_scores,
    gradient_rows,
    notes,
    row_facts,
    score_gradients,
    scores,
)
from .steps import repair_keys as repair_keys_step
from .steps.inlined import FALSE, TRUE, inlined
from .steps.integers import divide
from .steps.plain import first_column_of, first_row_of, key_queries, key_tiles


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, depth, width = config.head_dim, config.head_dim_v, config.depth, config.width
    of_dk, of_dv, in_registers = config.of_dk, config.of_dv, config.in_registers
    _, v_at, q_at, do_at, rows_at, weights_at, seen_at, notes_at, warps_at, _ = config.shared_offsets()
    dv_at = v_at if of_dk else 0  # where dV is staged
    bases_at, facts_at, offset_at, walk_at, tile_at = (notes_at + n * notes.SIZE for n in range(config.NOTES))
    alignment = config.ALIGNMENT
    stages, other_stage = config.stages, config.stages - 1
    q_stage, do_stage = (do_at - q_at) // stages, (rows_at - do_at) // stages  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_m // groups  # queries of a tile with which a warp computes scores
    rows_stage, row_chunks = 8 * tile_m, tile_m // 2  # of lse and -delta of a tile's queries: bytes, 16 at a time
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    columns = config.group_columns
    dk_columns, dv_columns = (depth, width) if groups == 1 else (columns, columns)  # that a warp sums up
    dk_count, dv_count = strips * dk_columns // 2 if of_dk else 1, strips * dv_columns // 2 if of_dv else 1
    k_count, v_count = strips * depth // 4, strips * width // 4 if of_dk else 1
    row_steps, a_count = -(-row_chunks // threads), 4 * strips
    has_softcap, has_alibi = config.softcap, config.alibi_dtype is not None

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_k, load_v = async_tiles.loader(tile_n, depth, threads), async_tiles.loader(tile_n, width, threads)
    load_q, load_do = async_tiles.loader(tile_m, depth, threads), async_tiles.loader(tile_m, width, threads)
    head, _ = scores.make(config)
    _, one_score, _, _, _ = fragment_scores.make(config, strips)
    columns_within = fragment_scores.columns_within
    weight, sure_weight, through_softcap = score_gradients.make(config, one_score)
    lanes_of, load_own, scores_product, gradient_product, *shared_by_warps = fragment_products.make(config)
    put, own_product, others_product = shared_by_warps
    load_k_frag, load_v_frag = load_own(depth), load_own(width)
    multiply_k_q, multiply_v_do = scores_product(depth), scores_product(width)
    multiply_p_do, multiply_ds_q = gradient_product(width), gradient_product(depth)
    stored_dk, stored_dv = (head_dim, head_dim_v) if groups == 1 else (columns, columns)
    stage_dk, store_dk = gradient_rows.make(config.dtype, tile_n, warp_rows, stored_dk, head_dim % 8 == 0)
    stage_dv, store_dv = gradient_rows.make(config.dtype, tile_n, warp_rows, stored_dv, head_dim_v % 8 == 0)
    repair_keys = repair_keys_step.make(config, sure_weight, through_softcap)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    commit, wait_all = cp_async.commit_group, cp_async.wait_group(0)
    load_v4, load_b32, store_shared = ld_st.load_v4, ld_st.load_b32, ld_st.store_b32
    bar_sync = bar.sync
    thread_index, block_index = special.thread_index, special.block_index
    address, shared_address = memory.address, shared.address
    pieces, piece, copy16 = row_facts.pieces, row_facts.PIECE, cp_async.copy16

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def first_query_of(lane, warp):
        """The lane's first column of scores, counted in the query tile."""
        return int32(first_column_of(lane)) + (warp & (groups - 1)) * part

    @inlined
    def tile_of(block, heads_kv, seqlen_k):
        """-> (b, h_kv, first_key). The first keys of a head come first: under a causal mask most queries see them."""
        n_tiles = divide(int32(seqlen_k) + int32(tile_n - 1), tile_n)
        head_of_all = divide(block, n_tiles)
        b = divide(head_of_all, heads_kv)
        return b, int32(head_of_all - b * heads_kv), int32((block - head_of_all * n_tiles) * tile_n)

    @inlined
    def load_rows(i, odd, base, k_smem, tiles, seqlen_q, thread):
        """Start the copies of lse and -delta of query tile i of a head, whose pieces begin at address base, to stage
        `odd`."""
        for step in range(row_steps):
            chunk = int32(thread + step * threads)
            if chunk < row_chunks:
                here = int32(i * (tile_m // 16) + (chunk >> 3)) < pieces(seqlen_q)
                at = base + int64(4) * int32(i * (2 * tile_m) + chunk * 4)
                # Added up in an order that leaves nothing to be kept in a register between tiles.
                to = tiles[2] + odd * rows_stage + 16 * chunk if stages > 1 else k_smem + 16 * chunk + int32(rows_at)
                copy16(to, at, 16 if here else 0)

    @inlined
    def rows_of_part(thread):
        """How far into a tile's lse and -delta those of the warp's part of the queries are, in bytes."""
        return ((thread >> int32(5)) & (groups - 1)) * (8 * part)

    @inlined
    def start_dp(acc_dp, rows_smem, lane):
        """acc_dp <- -delta of each column, so that the product adds up to dP - delta."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks // 2):
            load_v4(four, 0, rows_smem + n * 128 + 64 + ((lane & 3) << 4))
            for strip in range(strips):
                for half in range(2):
                    for i in range(4):
                        acc_dp[(strip * blocks + 2 * n + half) * 4 + i] = four[half * 2 + i % 2].view(np.float32)

    @inlined
    def note_place(
        b, h_kv, first_key, keys, q_start, group, walk, arrays, strides, sizes, k_smem, thread
    ):  # fmt: skip
        """What every tile needs to know. Heads are counted from behind, so that `members` says which one it is."""
        q, do, row_facts = arrays
        q_strides, do_strides, alibi_strides = strides
        heads, seqlen_q, left, right = sizes
        end_head = (h_kv + 1) * group
        if thread == 0:
            q_end = b * q_strides[0] + end_head * q_strides[1]
            do_end = b * do_strides[0] + end_head * do_strides[1]
            # Addresses: pointers, which are parameters, would be kept in registers through the loop.
            notes.put(k_smem + int32(bases_at), address(q, q_end), address(do, do_end))
            alibi_end = b * alibi_strides[0] + end_head * alibi_strides[1]
            facts_end = int64(b * heads + end_head) * (pieces(seqlen_q) * piece)
            notes.put(k_smem + int32(facts_at), address(row_facts, facts_end), alibi_end)
            notes.put(k_smem + int32(offset_at), q_start - first_key, keys)
            notes.put_range(k_smem + int32(walk_at), walk[0], walk[1])
            notes.put_range(k_smem + int32(walk_at + 8), walk[2], walk[3])
            notes.put(k_smem + int32(tile_at), int64(b), int64(first_key) << 32 | h_kv)
        if thread < tile_n:  # the queries that see a key
            first_query, end_query = key_queries(first_key + thread, q_start, left, right, seqlen_q)
            end_query = first_query if first_key + thread >= keys else end_query
            notes.put_range(k_smem + int32(seen_at) + 8 * thread, int32(first_query), int32(end_query))

    @inlined
    def distances(i, thread, k_smem, distance):
        """q_pos - k_pos of the lane's keys and its first column of query tile i."""
        lane, warp = thread & int32(31), thread >> int32(5)
        from_first_key, _ = notes.get(k_smem + int32(offset_at))
        for r in range(rows):
            key = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
            distance[r] = float32(int64(i) * tile_m + first_query_of(lane, warp) + from_first_key - key)

    @inlined
    def seen_columns(i, thread, r, k_smem):
        """Bits for those of the lane's columns of query tile i that see its key r."""
        lane, warp = thread & int32(31), thread >> int32(5)
        first_column = int32(i * int32(tile_m) + first_query_of(lane, warp))
        key = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
        first_query, end_query = notes.get_range(k_smem + int32(seen_at) + 8 * key)
        return columns_within(int32(first_query - first_column), int32(end_query - first_column), 0)

    @inlined
    def slope_of(members, k_smem, alibi_slopes, alibi_strides):
        _, alibi_end = notes.get(k_smem + int32(facts_at))
        return load_slope(alibi_slopes, alibi_end - members * alibi_strides[1])

    @inlined
    def weigh(i, acc_s, acc_dp, p_frag, ds_frag, k_smem, rows_smem, thread, slope, distance, scale, softcap, masked):
        """p_frag, ds_frag <- P^T and dS^T of query tile i in 16 bits. masked, a constant: some keys are not seen."""
        four = cuda.local.array(4, uint32)
        p = cuda.local.array(2, float32)
        ds = cuda.local.array(2, float32)
        for r in range(rows):
            seen = uint32(0)
            if masked:
                seen = seen_columns(i, thread, r, k_smem)
            for n in range(blocks // 2):
                load_v4(four, 0, rows_smem + n * 128 + ((thread & 3) << 4))
                for half in range(2):
                    block = (r // 2) * blocks + 2 * n + half
                    at = block * 4 + (r % 2) * 2
                    for x in range(2):
                        column = int32((2 * n + half) * 8 + x)
                        lse_log2 = four[half * 2 + x].view(np.float32)
                        product = acc_s[at + x]
                        p[x] = weight(product, slope, distance[r] + float32(column), scale, softcap, lse_log2)
                        if of_dk:
                            ds[x] = p[x] * acc_dp[at + x]
                            if has_softcap:
                                ds[x] *= through_softcap(product, scale, softcap)
                        if masked and (seen >> uint32(4 * n + 2 * half + x)) & uint32(1) == 0:
                            p[x] = float32(0)
                            ds[x] = float32(0)  # dP may be NaN there
                    if of_dv:
                        p_frag[block * 2 + r % 2] = pack(p[0], p[1])
                    if of_dk:
                        ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @inlined
    def queries_at(i, members, q_strides, k_smem):
        """The address of Q of query tile i of a head."""
        q_end, _ = notes.get(k_smem + int32(bases_at))
        return q_end + 2 * (int32(i * int32(tile_m)) * q_strides[2] - members * q_strides[1])

    @inlined
    def others_at(i, members, do_strides, seqlen_q, k_smem):
        """The addresses of dO of query tile i of a head, and of the head's lse and -delta."""
        _, do_end = notes.get(k_smem + int32(bases_at))
        facts_end, _ = notes.get(k_smem + int32(facts_at))
        do_place = do_end + 2 * (int32(i * int32(tile_m)) * do_strides[2] - members * do_strides[1])
        return do_place, facts_end - members * (pieces(seqlen_q) * (4 * piece))

    @inlined
    def load_queries(i, odd, source, q_strides, tiles, seqlen_q, thread):
        """Start the copies of Q of query tile i, which is at address `source`, to stage `odd`."""
        rows_left = int32(int32(seqlen_q) - i * int32(tile_m))
        load_q(tiles[0] + odd * q_stage, source, 2 * q_strides[2], 0, rows_left, head_dim, thread)

    @inlined
    def load_others(i, odd, sources, do_strides, k_smem, tiles, seqlen_q, thread):
        """Start the copies of dO, lse and -delta of query tile i to stage `odd`."""
        rows_left = int32(int32(seqlen_q) - i * int32(tile_m))
        load_do(tiles[1] + odd * do_stage, sources[0], 2 * do_strides[2], 0, rows_left, head_dim_v, thread)
        load_rows(i, odd, sources[1], k_smem, tiles, seqlen_q, thread)

    @inlined
    def following(i, members, k_smem):
        """-> (i, members) of the next query tile: after the last one the first one again, of the next head."""
        begin, stop = notes.get_range(k_smem + int32(walk_at))
        after = int32(i + 1)
        last = after == stop
        return begin if last else after, int32(members - 1) if last else members

    @inlined
    def is_whole(i, k_smem):
        """Whether every query of tile i sees every key of the block's."""
        free, cut = notes.get_range(k_smem + int32(walk_at + 8))
        return i >= free and i < cut

    @inlined
    def turn(i, members, odd, q_strides, do_strides, seqlen_q, k_smem, tiles):
        """Wait for dO of tile i, with two stages for Q too, and start the copies of what has a place now."""
        next_i, next_members, next_odd = i, members, odd
        if stages > 1:
            next_i, next_members = following(i, members, k_smem)
            next_odd = int32(odd ^ 1)
            others = others_at(next_i, next_members, do_strides, seqlen_q, k_smem)
        queries = queries_at(next_i, next_members, q_strides, k_smem)
        wait_all()
        cuda.syncthreads()  # it is there, and everyone is done with the tile before
        if next_members > 0:
            thread = thread_index()
            load_queries(next_i, next_odd, queries, q_strides, tiles, seqlen_q, thread)
            if stages > 1:
                load_others(next_i, next_odd, others, do_strides, k_smem, tiles, seqlen_q, thread)
        commit()

    @inlined
    def half_turn(i, members, do_strides, seqlen_q, k_smem, tiles):
        """With one stage, when everyone is done with dO of tile i: start the copies of the next one's."""
        next_i, next_members = following(i, members, k_smem)
        others = others_at(next_i, next_members, do_strides, seqlen_q, k_smem)
        cuda.syncthreads()
        if next_members > 0:
            load_others(next_i, 0, others, do_strides, k_smem, tiles, seqlen_q, thread_index())
        commit()

    @inlined
    def scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles):
        """S^T and dP^T - delta of the query tile in stage `odd`."""
        # With the thread's number read anew, addresses are not worked out ahead of the loop and kept in registers.
        thread = thread_index()
        own_lane, other_lane, _ = lanes_of(thread)
        for x in range(s_count):
            acc_s[x] = float32(0)
        if stages > 1:
            multiply_k_q(acc_s, k_frag, b_frag, own[0] + own_lane, tiles[0] + odd * q_stage + other_lane)
        if of_dk:
            start_dp(acc_dp, tiles[2] + odd * rows_stage + rows_of_part(thread), thread & int32(31))
            multiply_v_do(acc_dp, v_frag, b_frag, own[1] + own_lane, tiles[1] + odd * do_stage + other_lane)
        if stages == 1:  # Q has come only now
            wait_all()
            cuda.syncthreads()
            multiply_k_q(acc_s, k_frag, b_frag, own[0] + own_lane, tiles[0] + odd * q_stage + other_lane)

    @inlined
    def first_own_column(thread):
        """Of the columns of dK and dV that a warp sums up, where several share its rows."""
        return int32(((thread >> int32(5)) & (groups - 1)) * columns)

    @inlined
    def own_panels(thread):
        """How far into a tile the lane's rows of those columns begin, for a transposed operand."""
        return int32((first_own_column(thread) >> 6) * (tile_m * 128) + lanes_of(thread)[2])

    @inlined
    def gradients_of_tile(
        i, members, odd, do_strides, seqlen_q, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, a_frag,
        b_frag, own, tiles, slope, distance, scale, softcap, masked,
    ):  # fmt: skip
        """dK and dV += what the query tile in stage `odd` gives."""
        thread = thread_index()
        rows_tile = tiles[2] + odd * rows_stage + rows_of_part(thread)
        weigh(i, acc_s, acc_dp, p_frag, ds_frag, own[0], rows_tile, thread, slope, distance, scale, softcap, masked)
        q_tile, do_tile = tiles[0] + odd * q_stage, tiles[1] + odd * do_stage
        if groups > 1:
            # With the thread's number read anew for each product, places are not kept in registers through the others.
            weights, barrier = own[0] + int32(weights_at), (thread >> int32(5) >> shift) + 1
            put(p_frag, weights, thread)
            own_columns = do_tile + own_panels(thread)
            own_product(acc_dv, p_frag, b_frag, own_columns, width - first_own_column(thread), thread)
            bar_sync(barrier, 32 * groups)
            thread = thread_index()
            own_columns, own_rows = do_tile + own_panels(thread), weights + lanes_of(thread)[0]
            others_product(acc_dv, a_frag, b_frag, own_rows, own_columns, width - first_own_column(thread), thread)
            if stages == 1:
                half_turn(i, members, do_strides, seqlen_q, own[0], tiles)
            else:
                bar_sync(barrier, 32 * groups)  # everyone is done with P
            thread = thread_index()
            put(ds_frag, weights, thread)
            own_columns = q_tile + own_panels(thread)
            own_product(acc_dk, ds_frag, b_frag, own_columns, depth - first_own_column(thread), thread)
            bar_sync(barrier, 32 * groups)
            thread = thread_index()
            own_columns, own_rows = q_tile + own_panels(thread), weights + lanes_of(thread)[0]
            others_product(acc_dk, a_frag, b_frag, own_rows, own_columns, depth - first_own_column(thread), thread)
        else:
            _, _, other_transposed = lanes_of(thread)
            q_tile, do_tile = q_tile + other_transposed, do_tile + other_transposed
            if of_dv:
                multiply_p_do(acc_dv, p_frag, b_frag, do_tile)
            if stages == 1:
                half_turn(i, members, do_strides, seqlen_q, own[0], tiles)
            if of_dk:
                multiply_ds_q(acc_dk, ds_frag, b_frag, q_tile)

    @cuda.jit
    def flash_attention_mma_dkdv(
        q, k, v, do, row_facts, alibi_slopes, seqlens_k, q_offsets, dk, dv,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dk_strides, dv_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale_, softcap_,
    ):  # fmt: skip
        scale, softcap = float32(scale_), float32(softcap_)
        thread = thread_index()
        smem = cuda.shared.array(0, uint8)
        k_smem = aligned(shared_address(smem))  # (tile_n, depth)
        own = (k_smem, k_smem + int32(v_at))  # K and V (tile_n, width)
        # The stages of Q (tile_m, depth), dO (tile_m, width), and lse and -delta (tile_m,).
        tiles = (k_smem + int32(q_at), k_smem + int32(do_at), k_smem + int32(rows_at))
        b, h_kv, first_key = tile_of(block_index(), heads_kv, seqlen_k)
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        keys_left = int32(min(keys - first_key, tile_n))  # may be below 0
        group = divide(heads, heads_kv)
        top_first, top_end = key_queries(first_key, q_start, left, right, seqlen_q)
        bottom_first, bottom_end = key_queries(first_key + keys_left - 1, q_start, left, right, seqlen_q)
        begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        note_place(
            b, h_kv, first_key, keys, q_start, group, (begin, stop, free, cut), (q, do, row_facts),
            (q_strides, do_strides, alibi_strides), (heads, seqlen_q, left, right), k_smem, thread,
        )  # fmt: skip
        cuda.syncthreads()

        acc_s = cuda.local.array(s_count, float32)  # (strips, part / 8, 4)
        acc_dp = cuda.local.array(s_count, float32)  # (strips, part / 8, 4)
        acc_dk = cuda.local.array(dk_count, float32)  # (strips, dk_columns / 8, 4)
        acc_dv = cuda.local.array(dv_count, float32)  # (strips, dv_columns / 8, 4)
        p_frag = cuda.local.array(frag_count, uint32)  # (strips, part / 8, 2)
        ds_frag = cuda.local.array(frag_count, uint32)  # (strips, part / 8, 2)
        k_frag = cuda.local.array(k_count, uint32)  # (strips, depth / 16, 4)
        v_frag = cuda.local.array(v_count, uint32)  # (strips, width / 16, 4)
        a_frag = cuda.local.array(a_count, uint32)  # (strips, 4) of P^T or dS^T from shared memory
        b_frag = cuda.local.array(4, uint32)  # (16, 16) of Q or dO
        distance = cuda.local.array(rows, float32)
        for x in range(dk_count):
            acc_dk[x] = float32(0)
        for x in range(dv_count):
            acc_dv[x] = float32(0)

        # odd: which stage is in use; members: heads of the group that are left.
        i, odd, members, whole = begin, int32(0), int32(0), begin >= free and begin < cut
        slope = float32(0)
        if begin < stop and keys_left > 0:
            members = group
            k_base = b * k_strides[0] + h_kv * k_strides[1] + first_key * k_strides[2]
            load_k(own[0], address(k, k_base), 2 * k_strides[2], 0, keys_left, head_dim, thread)
            if of_dk:
                v_base = b * v_strides[0] + h_kv * v_strides[1] + first_key * v_strides[2]
                load_v(own[1], address(v, v_base), 2 * v_strides[2], 0, keys_left, head_dim_v, thread)
            others = others_at(i, members, do_strides, seqlen_q, own[0])
            load_others(i, odd, others, do_strides, own[0], tiles, seqlen_q, thread)
            if stages > 1:
                queries = queries_at(i, members, q_strides, own[0])
                load_queries(i, odd, queries, q_strides, tiles, seqlen_q, thread)
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
            while members > 0 and not whole:
                turn(i, members, odd, q_strides, do_strides, seqlen_q, own[0], tiles)
                scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles)
                if has_alibi:
                    slope = slope_of(members, own[0], alibi_slopes, alibi_strides)
                    distances(i, thread_index(), own[0], distance)
                gradients_of_tile(
                    i, members, odd, do_strides, seqlen_q, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, a_frag,
                    b_frag, own, tiles, slope, distance, scale, softcap, TRUE,
                )  # fmt: skip
                odd = int32(odd ^ other_stage)
                i, members = following(i, members, own[0])
                whole = is_whole(i, own[0])
            while members > 0 and whole:
                turn(i, members, odd, q_strides, do_strides, seqlen_q, own[0], tiles)
                scores_of_tile(odd, acc_s, acc_dp, k_frag, v_frag, b_frag, own, tiles)
                if has_alibi:
                    slope = slope_of(members, own[0], alibi_slopes, alibi_strides)
                    distances(i, thread_index(), own[0], distance)
                gradients_of_tile(
                    i, members, odd, do_strides, seqlen_q, acc_s, acc_dp, acc_dk, acc_dv, p_frag, ds_frag, a_frag,
                    b_frag, own, tiles, slope, distance, scale, softcap, FALSE,
                )  # fmt: skip
                odd = int32(odd ^ other_stage)
                i, members = following(i, members, own[0])
                whole = is_whole(i, own[0])

        # dK and dV to the place of the warp's own rows of K and V, and from there to global memory.
        wait_all()
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bar_sync((warp >> shift) + 1, 32 * groups)  # those who share these rows have read them for the last time
        first_row = int32((warp >> shift) * warp_rows)
        first_column = int32((warp & (groups - 1)) * columns)
        # From the notes: kept through the loop, it would cost the registers that S needs.
        b, tile = notes.get(k_smem + int32(tile_at))
        first_key, h_kv = int32(tile >> 32), int32(tile)
        from_first_key, keys = notes.get(k_smem + int32(offset_at))
        q_start = from_first_key + first_key
        keys_left = int32(min(keys - first_key, tile_n))
        rows_left = int32(min(seqlen_k - first_key, tile_n))
        own_panels = (first_column >> 6) * (tile_n * 128)
        dk_smem, dv_smem = k_smem + own_panels, k_smem + int32(dv_at) + own_panels
        dk_left, dv_left = int32(head_dim - first_column), int32(head_dim_v - first_column)
        suspects = uint32(0)
        if of_dk and dk_left > 0:
            suspects |= stage_dk(acc_dk, scale, dk_smem, first_row, lane, keys_left)
        if of_dv and dv_left > 0:
            suspects |= stage_dv(acc_dv, float32(1), dv_smem, first_row, lane, keys_left)
        if groups > 1:  # a row that is no number in one panel is computed again in all
            store_shared(k_smem + int32(warps_at) + 4 * warp, suspects)
            bar_sync((warp >> shift) + 1, 32 * groups)
            for other in range(groups):
                suspects |= load_b32(k_smem + int32(warps_at) + 4 * ((warp & int32(-groups)) + other))
        if of_dk and dk_left > 0:
            base = b * dk_strides[0] + h_kv * dk_strides[1] + first_key * dk_strides[2] + first_column
            store_dk(dk_smem, first_row, lane, dk, base, dk_strides[2], rows_left, dk_left, suspects)
        if of_dv and dv_left > 0:
            base = b * dv_strides[0] + h_kv * dv_strides[1] + first_key * dv_strides[2] + first_column
            store_dv(dv_smem, first_row, lane, dv, base, dv_strides[2], rows_left, dv_left, suspects)
        if groups > 1:  # each warp of a group repairs some
            share = warp_rows // groups
            suspects &= uint32((1 << share) - 1) << uint32((warp & (groups - 1)) * share)
        if suspects != 0:
            repair_keys(
                suspects, first_row, lane, (q, k, v, do), (q_strides, k_strides, v_strides, do_strides),
                (dk, dv), (dk_strides, dv_strides), row_facts, alibi_slopes, alibi_strides,
                b, heads, heads_kv, h_kv, first_key, q_start, seqlen_q, left, right, scale, softcap,
            )  # fmt: skip

    return flash_attention_mma_dkdv
