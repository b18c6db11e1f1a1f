"""Gradients of queries on tensor cores: mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read mma_forward and mma_backward_dkdv first. A block owns a tile of queries of one head and walks over the tiles of
keys that they see, like the forward, but without an online softmax: lse is known. A warp owns `warp_rows` queries,

    S = Q K^T     P = 2^(scale_log2 S - lse_log2)     dP = dO V^T     dS = P * (dP - delta)     dQ += dS K

and at the end dQ *= scale. With `column_groups` warps share queries and exchange dS, as in mma_backward_dkdv; else what
a lane holds of dS is, rounded to 16 bits, what it must hold as the first operand of
dS . K, so it never leaves the registers. With one stage K and V take turns as Q and dO do there: while dQ is summed up
from K, the next V comes, and while dP is computed from it, the next K.

Letters as in v2. Which keys a query sees, its lse and its -delta lie in shared memory.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory.
Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dq is contiguous.
"""

import math

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
from .steps import repair_queries as repair_queries_step
from .steps.inlined import FALSE, TRUE, inlined
from .steps.integers import divide
from .steps.plain import first_column_of, first_row_of, key_tiles, row_keys


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, depth, width = config.head_dim, config.head_dim_v, config.depth, config.width
    in_registers, alignment = config.in_registers, config.ALIGNMENT
    _, do_at, k_at, v_at, weights_at, of_rows_at, notes_at, warps_at, _ = config.shared_offsets()
    bases_at, keys_at, head_at, tile_at, walk_at = (notes_at + n * notes.SIZE for n in range(config.NOTES))
    stages, other_stage = config.stages, config.stages - 1
    k_stage, v_stage = (v_at - k_at) // stages, (weights_at - v_at) // stages  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_n // groups  # keys of a tile with which a warp computes scores
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    columns = config.group_columns
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    dq_count = strips * (depth if groups == 1 else columns) // 2
    q_count, do_count, a_count = strips * depth // 4, strips * width // 4, 4 * strips
    has_softcap, has_alibi = config.softcap, config.alibi_dtype is not None

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_q, load_do = async_tiles.loader(tile_m, depth, threads), async_tiles.loader(tile_m, width, threads)
    load_k, load_v = async_tiles.loader(tile_n, depth, threads), async_tiles.loader(tile_n, width, threads)
    head, _ = scores.make(config)
    _, one_score, _, _, _ = fragment_scores.make(config, strips)
    columns_within = fragment_scores.columns_within
    weight, sure_weight, through_softcap = score_gradients.make(config, one_score)
    lanes_of, load_own, scores_product, gradient_product, *shared_by_warps = fragment_products.make(config)
    put, own_product, others_product = shared_by_warps
    load_q_frag, load_do_frag = load_own(depth), load_own(width)
    multiply_q_k, multiply_do_v = scores_product(depth), scores_product(width)
    multiply_ds_k = gradient_product(depth)
    stage_dq, store_dq = gradient_rows.make(
        config.dtype, tile_m, warp_rows, head_dim if groups == 1 else columns, head_dim % 8 == 0
    )
    repair_queries = repair_queries_step.make(config, sure_weight, through_softcap)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    load_v4, load_b32, store_shared = ld_st.load_v4, ld_st.load_b32, ld_st.store_b32
    bar_sync = bar.sync
    commit, wait_all = cp_async.commit_group, cp_async.wait_group(0)
    thread_index, block_index = special.thread_index, special.block_index
    address, shared_address = memory.address, shared.address
    pieces, piece, place, minus_delta_at = row_facts.pieces, row_facts.PIECE, row_facts.place, row_facts.MINUS_DELTA
    inf = float32(math.inf)

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def first_key_of(lane, warp):
        """The lane's first column of scores, counted in the key tile."""
        return int32(first_column_of(lane)) + (warp & (groups - 1)) * part

    @inlined
    def tile_of(block, heads, heads_kv, seqlen_q):
        """-> (b, h, h_kv, first_query). The last queries of a head come first: under a causal mask they see most."""
        m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
        head_tiles = divide(block, m_tiles)
        b = divide(head_tiles, heads)
        h = int32(head_tiles - b * heads)
        first_query = int32((m_tiles - 1 - (block - head_tiles * m_tiles)) * tile_m)
        return b, h, divide(h, divide(heads, heads_kv)), first_query

    @inlined
    def note_place(
        b, h, h_kv, first_query, tile_pos, keys, walk, heads, seqlen_q, row_facts, arrays, k_strides, v_strides,
        left, right, q_smem, thread,
    ):  # fmt: skip
        """What every tile needs to know."""
        k, v = arrays
        if thread == 0:
            k_base, v_base = b * k_strides[0] + h_kv * k_strides[1], b * v_strides[0] + h_kv * v_strides[1]
            # Addresses: pointers, which are parameters, would be kept in registers through the loop.
            notes.put(q_smem + int32(bases_at), address(k, k_base), address(v, v_base))
            notes.put(q_smem + int32(keys_at), int64(tile_pos), int64(keys))
            notes.put(q_smem + int32(head_at), int64(b), int64(h))
            notes.put(q_smem + int32(tile_at), int64(first_query), int64(h_kv))
            notes.put_range(q_smem + int32(walk_at), walk[0], walk[1])
        head_facts = int64(b * heads + h) * (pieces(seqlen_q) * piece)
        for step in range(-(-tile_m // threads)):
            row = int32(thread + step * threads)
            if row < tile_m:
                first_key, end_key = row_keys(tile_pos + row, left, right, keys)
                lse_log2, minus_delta = inf, float32(0)
                if first_query + row < seqlen_q:
                    at = head_facts + place(first_query + row)
                    lse_log2, minus_delta = row_facts[at], row_facts[at + minus_delta_at]
                of_row = q_smem + int32(of_rows_at) + 16 * row
                notes.put_range(of_row, int32(first_key), int32(end_key))
                store_shared(of_row + 8, float32(lse_log2).view(np.uint32))
                store_shared(of_row + 12, float32(minus_delta).view(np.uint32))

    @inlined
    def is_whole(j, q_smem):
        """Whether every row sees every key of tile j."""
        free, cut = notes.get_range(q_smem + int32(walk_at))
        return j >= free and j < cut

    @inlined
    def of_row(r, thread, q_smem):
        """Where in shared memory that of the lane's row r lies."""
        lane, warp = thread & int32(31), thread >> int32(5)
        return q_smem + int32(of_rows_at) + 16 * ((warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8)

    @inlined
    def distances(j, thread, q_smem, distance):
        """q_pos - k_pos of the lane's rows and its first column of key tile j."""
        lane, warp = thread & int32(31), thread >> int32(5)
        tile_pos, _ = notes.get(q_smem + int32(keys_at))
        for r in range(rows):
            row = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
            distance[r] = float32(tile_pos + row - int64(j) * tile_n - first_key_of(lane, warp))

    @inlined
    def places_of(j, k_strides, v_strides, q_smem):
        """-> (the address of K of key tile j, that of V, how many keys are left from there on)."""
        first_key = int32(j * int32(tile_n))
        k_base, v_base = notes.get(q_smem + int32(bases_at))
        _, keys = notes.get(q_smem + int32(keys_at))
        return k_base + 2 * (first_key * k_strides[2]), v_base + 2 * (first_key * v_strides[2]), int32(keys) - first_key

    @inlined
    def load_keys(places, odd, k_strides, tiles, thread):
        """Start the copies of K of a key tile to stage `odd`."""
        load_k(tiles[0] + odd * k_stage, places[0], 2 * k_strides[2], 0, places[2], head_dim, thread)

    @inlined
    def load_values(places, odd, v_strides, tiles, thread):
        """Start the copies of V of a key tile to stage `odd`."""
        load_v(tiles[1] + odd * v_stage, places[1], 2 * v_strides[2], 0, places[2], head_dim_v, thread)

    @inlined
    def turn(j, odd, begin, k_strides, v_strides, q_smem, tiles):
        """Wait for V of tile j, with two stages for K too, and start the copies of what has a place now."""
        places = places_of(j if stages == 1 else int32(j - 1), k_strides, v_strides, q_smem)
        wait_all()
        cuda.syncthreads()  # it is there, and everyone is done with the tile before
        if stages == 1:
            load_keys(places, odd, k_strides, tiles, thread_index())
        elif j > begin:
            load_keys(places, int32(odd ^ 1), k_strides, tiles, thread_index())
            load_values(places, int32(odd ^ 1), v_strides, tiles, thread_index())
        commit()

    @inlined
    def half_turn(j, begin, k_strides, v_strides, q_smem, tiles):
        """With one stage: wait for K of tile j and start the copies of V of the next one, tile j - 1."""
        places = places_of(int32(j - 1), k_strides, v_strides, q_smem)
        wait_all()
        cuda.syncthreads()  # K is there, and everyone is done with V
        if j > begin:
            load_values(places, 0, v_strides, tiles, thread_index())
        commit()

    @inlined
    def start_dp(acc_dp, q_smem, thread):
        """acc_dp <- -delta of each row, so that the product adds up to dP - delta."""
        for r in range(rows):
            minus_delta = uint32(load_b32(of_row(r, thread, q_smem) + 12)).view(np.float32)
            for n in range(blocks):
                for x in range(2):
                    acc_dp[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x] = minus_delta

    @inlined
    def weigh(j, acc_s, acc_dp, ds_frag, q_smem, thread, slope, distance, scale, softcap, masked):
        """ds_frag <- dS of key tile j in 16 bits. masked, a constant: some columns are not seen by some rows."""
        four = cuda.local.array(4, uint32)
        ds = cuda.local.array(2, float32)
        first_column = int32(j * int32(tile_n) + first_key_of(thread & int32(31), thread >> int32(5)))
        for r in range(rows):
            load_v4(four, 0, of_row(r, thread, q_smem))
            seen = uint32(0)
            if masked:
                first, end = int32(int32(four[0]) - first_column), int32(int32(four[1]) - first_column)
                seen = columns_within(first, end, 0)
            lse_log2 = four[2].view(np.float32)
            for n in range(blocks):
                block = (r // 2) * blocks + n
                at = block * 4 + (r % 2) * 2
                for x in range(2):
                    column = int32(n * 8 + x)
                    product = acc_s[at + x]
                    p = weight(product, slope, distance[r] - float32(column), scale, softcap, lse_log2)
                    ds[x] = p * acc_dp[at + x]
                    if has_softcap:
                        ds[x] *= through_softcap(product, scale, softcap)
                    if masked and (seen >> uint32(2 * n + x)) & uint32(1) == 0:
                        ds[x] = float32(0)
                ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @inlined
    def products_of_tile(
        j, odd, begin, k_strides, v_strides, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, slope, distance,
        scale, softcap, masked,
    ):  # fmt: skip
        """dQ += what the key tile in stage `odd` gives."""
        q_frag, do_frag, ds_frag, a_frag, b_frag = fragments_
        own_lane, other_lane, other_transposed = lanes
        k_tile, v_tile = tiles[0] + odd * k_stage, tiles[1] + odd * v_stage
        for x in range(s_count):
            acc_s[x] = float32(0)
        if stages > 1:
            multiply_q_k(acc_s, q_frag, b_frag, own[0] + own_lane, k_tile + other_lane)
        thread = thread_index()
        start_dp(acc_dp, own[0], thread)
        multiply_do_v(acc_dp, do_frag, b_frag, own[1] + own_lane, v_tile + other_lane)
        if stages == 1:  # K has come only now
            half_turn(j, begin, k_strides, v_strides, own[0], tiles)
            multiply_q_k(acc_s, q_frag, b_frag, own[0] + own_lane, k_tile + other_lane)
        thread = thread_index()
        weigh(j, acc_s, acc_dp, ds_frag, own[0], thread, slope, distance, scale, softcap, masked)
        if groups > 1:
            warp, weights = thread >> int32(5), own[0] + int32(weights_at)
            first = (warp & (groups - 1)) * columns
            k_tile += other_transposed + (first >> 6) * (tile_n * 128)
            put(ds_frag, weights, thread)
            own_product(acc_dq, ds_frag, b_frag, k_tile, depth - first, thread)
            bar_sync((warp >> shift) + 1, 32 * groups)
            others_product(acc_dq, a_frag, b_frag, weights + own_lane, k_tile, depth - first, thread)
        else:
            multiply_ds_k(acc_dq, ds_frag, b_frag, k_tile + other_transposed)

    @cuda.jit
    def flash_attention_mma_dq(
        q, k, v, do, row_facts, alibi_slopes, seqlens_k, q_offsets, dq,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dq_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale_, softcap_,
    ):  # fmt: skip
        scale, softcap = float32(scale_), float32(softcap_)
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        b, h, h_kv, first_query = tile_of(block_index(), heads, heads_kv, seqlen_q)
        keys_, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        keys, tile_pos = int32(keys_), first_query + q_start
        queries_left = int32(min(seqlen_q - first_query, tile_m))

        smem = cuda.shared.array(0, uint8)
        q_smem = aligned(shared_address(smem))  # (tile_m, depth)
        own = (q_smem, q_smem + int32(do_at))  # Q and dO (tile_m, width)
        tiles = (q_smem + int32(k_at), q_smem + int32(v_at))  # the stages of K (tile_n, depth), of V (tile_n, width)
        lanes = lanes_of(thread)

        top_first, top_end = row_keys(tile_pos, left, right, keys)
        bottom_first, bottom_end = row_keys(tile_pos + queries_left - 1, left, right, keys)
        begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        begin, free, cut = int32(begin_), int32(free_), int32(cut_)
        note_place(
            b, h, h_kv, first_query, tile_pos, keys, (free, cut), heads, seqlen_q, row_facts, (k, v), k_strides,
            v_strides, left, right, q_smem, thread,
        )  # fmt: skip
        cuda.syncthreads()

        acc_s = cuda.local.array(s_count, float32)  # (strips, part / 8, 4)
        acc_dp = cuda.local.array(s_count, float32)  # (strips, part / 8, 4)
        acc_dq = cuda.local.array(dq_count, float32)  # (strips, depth / 8, 4)
        ds_frag = cuda.local.array(frag_count, uint32)  # (strips, part / 8, 2)
        q_frag = cuda.local.array(q_count, uint32)  # (strips, depth / 16, 4)
        do_frag = cuda.local.array(do_count, uint32)  # (strips, width / 16, 4)
        a_frag = cuda.local.array(a_count, uint32)  # (strips, 4) of dS from shared memory
        b_frag = cuda.local.array(4, uint32)  # (16, 16) of K or V
        distance = cuda.local.array(rows, float32)
        fragments_ = (q_frag, do_frag, ds_frag, a_frag, b_frag)
        for x in range(dq_count):
            acc_dq[x] = float32(0)

        j, odd = int32(stop_ - 1), int32(0)  # odd: which stage is in use
        if j >= begin:
            q_base = b * q_strides[0] + h * q_strides[1] + first_query * q_strides[2]
            do_base = b * do_strides[0] + h * do_strides[1] + first_query * do_strides[2]
            load_q(own[0], address(q, q_base), 2 * q_strides[2], 0, queries_left, head_dim, thread)
            load_do(own[1], address(do, do_base), 2 * do_strides[2], 0, queries_left, head_dim_v, thread)
            places = places_of(j, k_strides, v_strides, q_smem)
            load_values(places, odd, v_strides, tiles, thread)
            if stages > 1:
                load_keys(places, odd, k_strides, tiles, thread)
        commit()
        slope = float32(0)
        if has_alibi:
            slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
        if in_registers:
            wait_all()
            cuda.syncthreads()
            load_q_frag(q_frag, own[0] + lanes[0])
            load_do_frag(do_frag, own[1] + lanes[0])

        whole = j >= free and j < cut
        while j >= begin:
            # Tiles that some row sees in part; then those that every row sees whole; then, behind a left window,
            # some of the first kind again.
            while j >= begin and not whole:
                turn(j, odd, begin, k_strides, v_strides, q_smem, tiles)
                if has_alibi:
                    distances(j, thread_index(), q_smem, distance)
                products_of_tile(
                    j, odd, begin, k_strides, v_strides, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, slope,
                    distance, scale, softcap, TRUE,
                )  # fmt: skip
                j, odd = int32(j - 1), int32(odd ^ other_stage)
                whole = is_whole(j, q_smem)
            while j >= begin and whole:
                turn(j, odd, begin, k_strides, v_strides, q_smem, tiles)
                if has_alibi:
                    distances(j, thread_index(), q_smem, distance)
                products_of_tile(
                    j, odd, begin, k_strides, v_strides, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, slope,
                    distance, scale, softcap, FALSE,
                )  # fmt: skip
                j, odd = int32(j - 1), int32(odd ^ other_stage)
                whole = is_whole(j, q_smem)

        # dQ to the place of the warp's own rows of Q, and from there to global memory. Where all this belongs is in the
        # notes: kept through the loop, it would cost the registers that S needs.
        wait_all()
        tile_pos, keys_ = notes.get(q_smem + int32(keys_at))
        b, h_ = notes.get(q_smem + int32(head_at))
        first_query_, h_kv_ = notes.get(q_smem + int32(tile_at))
        h, h_kv, first_query, keys = int32(h_), int32(h_kv_), int32(first_query_), int32(keys_)
        q_start = tile_pos - first_query
        queries_left = int32(min(seqlen_q - first_query, tile_m))
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bar_sync((warp >> shift) + 1, 32 * groups)  # those who share these rows have read them for the last time
        first_row = int32((warp >> shift) * warp_rows)
        first_column = int32((warp & (groups - 1)) * columns)
        dq_smem, dq_left = q_smem + (first_column >> 6) * (tile_m * 128), int32(head_dim - first_column)
        suspects = uint32(0)
        if dq_left > 0:
            suspects |= stage_dq(acc_dq, scale, dq_smem, first_row, lane, queries_left)
        if groups > 1:  # a row that is no number in one panel is computed again in all
            store_shared(q_smem + int32(warps_at) + 4 * warp, suspects)
            bar_sync((warp >> shift) + 1, 32 * groups)
            for other in range(groups):
                suspects |= load_b32(q_smem + int32(warps_at) + 4 * ((warp & int32(-groups)) + other))
        if dq_left > 0:
            base = b * dq_strides[0] + h * dq_strides[1] + first_query * dq_strides[2] + first_column
            store_dq(dq_smem, first_row, lane, dq, base, dq_strides[2], queries_left, dq_left, suspects)
        if groups > 1:  # each warp of a group repairs some
            share = warp_rows // groups
            suspects &= uint32((1 << share) - 1) << uint32((warp & (groups - 1)) * share)
        if suspects != 0:
            repair_queries(
                suspects, first_row, lane, (q, k, v, do), (q_strides, k_strides, v_strides, do_strides),
                dq, dq_strides, row_facts, slope, b, h, heads, h_kv, first_query, q_start, seqlen_q, keys,
                left, right, scale, softcap,
            )  # fmt: skip

    return flash_attention_mma_dq
