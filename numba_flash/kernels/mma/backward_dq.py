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
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, cp_async, cvt, ld_st, memory, shared, special
from ..score import counts, fragments, positions
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.reads import Origin
from ..score.stage import FragmentAt
from ..steps import async_tiles, block_state, fragment_products, gradient_rows, lse_delta
from ..steps import recompute_queries as recompute
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, key_tiles, row_keys
from ..steps.query_tile import QueryTile, TileKeys
from ..steps.tiles import row_base


class Registers(NamedTuple):
    """What a warp holds of S, dP and dQ, and of operands. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dq: Any
    ds_frag: Any
    q_frag: Any
    do_frag: Any
    a_frag: Any
    b_frag: Any
    distance: Any  # q_pos - k_pos of each row at the lane's first column
    loaded: Any  # what its scores need from global memory (kernels/score/reads.py)
    shown_bits: Any  # by the mask that was given
    kept: Any  # which weights count (kernels/score/counts.py)


class Smem(NamedTuple):
    """Shared addresses: the block's own Q and dO, and the stages of K and V."""

    q: int
    do: int
    k: int
    v: int


class Lanes(NamedTuple):
    """Where the lane's matrix rows begin in a tile: of the block's own rows, of keys, and of keys transposed."""

    own: int
    other: int
    transposed: int


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, head_dim_padded, head_dim_v_padded = (
        config.head_dim,
        config.head_dim_v,
        config.head_dim_padded,
        config.head_dim_v_padded,
    )
    in_registers, alignment = config.in_registers, config.ALIGNMENT
    _, do_at, k_at, v_at, weights_at, of_rows_at, state_at, warps_at, _ = config.shared_offsets()
    bases_at, keys_at, head_at, tile_at, walk_at, origin_at = (state_at + n * block_state.SIZE for n in range(6))
    stages, other_stage = config.stages, config.stages - 1
    k_stage, v_stage = (v_at - k_at) // stages, (weights_at - v_at) // stages  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_n // groups  # keys of a tile with which a warp computes scores
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    columns = config.group_columns
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    dq_count = strips * (head_dim_padded if groups == 1 else columns) // 2
    q_count, do_count, a_count = strips * head_dim_padded // 4, strips * head_dim_v_padded // 4, 4 * strips

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_q, load_do = (
        async_tiles.loader(tile_m, head_dim_padded, threads),
        async_tiles.loader(tile_m, head_dim_v_padded, threads),
    )
    load_k, load_v = (
        async_tiles.loader(tile_n, head_dim_padded, threads),
        async_tiles.loader(tile_n, head_dim_v_padded, threads),
    )
    keys_and_start = positions.make(config)
    chain, (weight, _) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = score_reads.make(config, strips, part), config.has("mask")
    reads, origin_of, load_reads, added, ends_of = read.reads, read.origin, read.load, read.added, read.ends
    bias_words, bits_words = read.bias_words, read.bits_words
    drops, kept_words, kept_of, *_ = counts.on_fragments(config, strips, part)
    row_term, has_row_term = chain.row_term, chain.has_row_term
    lanes_of, load_own, scores_product, gradient_product, *shared_by_warps = fragment_products.make(config)
    put, own_product, others_product = shared_by_warps
    load_q_frag, load_do_frag = load_own(head_dim_padded), load_own(head_dim_v_padded)
    multiply_q_k, multiply_do_v = scores_product(head_dim_padded), scores_product(head_dim_v_padded)
    multiply_ds_k = gradient_product(head_dim_padded)
    stage_dq, store_dq = gradient_rows.make(
        config.dtype, tile_m, warp_rows, head_dim if groups == 1 else columns, head_dim % 8 == 0
    )
    recompute_queries = recompute.make(config)
    wait_all = cp_async.wait_group(0)
    row_blocks, block_words, place, minus_delta_at = (
        lse_delta.row_blocks,
        lse_delta.BLOCK_WORDS,
        lse_delta.place,
        lse_delta.MINUS_DELTA,
    )
    inf = float32(math.inf)

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def first_key_of(lane, warp):
        """The lane's first column of scores, counted in the key tile."""
        return int32(first_column_of(lane)) + (warp & (groups - 1)) * part

    @inlined
    def tile_of(block, arrays, strides, sizes):
        """-> QueryTile, TileKeys. The last queries of a head come first: under a causal mask they see most keys."""
        m_tiles = divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m)
        head_tiles = divide(block, m_tiles)
        b = divide(head_tiles, sizes.heads)
        h = int32(head_tiles - b * sizes.heads)
        first_query = int32((m_tiles - 1 - (block - head_tiles * m_tiles)) * tile_m)
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        return QueryTile(b, h, first_query, int32(0)), TileKeys(h_kv, int32(keys), first_query + q_start)

    @inlined
    def set_up_state(tile, tile_keys, walk, arrays, strides, sizes, q_smem, thread):
        """What every tile needs to know."""
        b, h, first_query, _ = tile
        h_kv, keys, tile_pos = tile_keys
        if thread == 0:
            k_base, v_base = row_base(strides.k, b, h_kv, 0), row_base(strides.v, b, h_kv, 0)
            # Addresses: pointers, which are parameters, would be kept in registers through the loop.
            block_state.put(
                q_smem + int32(bases_at), memory.address(arrays.k, k_base), memory.address(arrays.v, v_base)
            )
            block_state.put(q_smem + int32(keys_at), int64(tile_pos), int64(keys))
            block_state.put(q_smem + int32(head_at), int64(b), int64(h))
            block_state.put(q_smem + int32(tile_at), int64(first_query), int64(h_kv))
            block_state.put_range(q_smem + int32(walk_at), walk[0], walk[1])
            if reads:
                origin = origin_of(b, h, first_query, arrays, strides)
                block_state.put(q_smem + int32(origin_at), origin.bias, origin.bits)
        head_lse_delta = int64(b * sizes.heads + h) * (row_blocks(sizes.seqlen_q) * block_words)
        for step in range(-(-tile_m // threads)):
            row = int32(thread + step * threads)
            if row < tile_m:
                first_key, end_key = row_keys(tile_pos + row, sizes.left, sizes.right, keys)
                lse_log2, minus_delta = inf, float32(0)
                if first_query + row < sizes.seqlen_q:
                    at = head_lse_delta + place(first_query + row)
                    lse_log2, minus_delta = arrays.lse_delta[at], arrays.lse_delta[at + minus_delta_at]
                of_row = q_smem + int32(of_rows_at) + 16 * row
                block_state.put_range(of_row, int32(first_key), int32(end_key))
                ld_st.store_b32(of_row + 8, float32(lse_log2).view(np.uint32))
                ld_st.store_b32(of_row + 12, float32(minus_delta).view(np.uint32))

    @inlined
    def is_unmasked(j, q_smem):
        """Whether every row sees every key of tile j."""
        free, cut = block_state.get_range(q_smem + int32(walk_at))
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
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        for r in range(rows):
            row = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
            distance[r] = float32(tile_pos + row - int64(j) * tile_n - first_key_of(lane, warp))

    @inlined
    def places_of(j, strides, q_smem):
        """-> (the address of K of key tile j, that of V, how many keys are left from there on)."""
        first_key = int32(j * int32(tile_n))
        k_base, v_base = block_state.get(q_smem + int32(bases_at))
        _, keys = block_state.get(q_smem + int32(keys_at))
        return k_base + 2 * (first_key * strides.k[2]), v_base + 2 * (first_key * strides.v[2]), int32(keys) - first_key

    @inlined
    def load_keys(places, stage, strides, smem, thread):
        """Start the copies of K of a key tile to stage `stage`."""
        load_k(smem.k + stage * k_stage, places[0], 2 * strides.k[2], 0, places[2], head_dim, thread)

    @inlined
    def load_values(places, stage, strides, smem, thread):
        """Start the copies of V of a key tile to stage `stage`."""
        load_v(smem.v + stage * v_stage, places[1], 2 * strides.v[2], 0, places[2], head_dim_v, thread)

    @inlined
    def prefetch(j, stage, begin, smem, strides):
        """Wait for V of tile j, with two stages for K too, and start the copies of what has a place now."""
        places = places_of(j if stages == 1 else int32(j - 1), strides, smem.q)
        wait_all()
        cuda.syncthreads()  # it is there, and everyone is done with the tile before
        if stages == 1:
            load_keys(places, stage, strides, smem, special.thread_index())
        elif j > begin:
            load_keys(places, int32(stage ^ 1), strides, smem, special.thread_index())
            load_values(places, int32(stage ^ 1), strides, smem, special.thread_index())
        cp_async.commit_group()

    @inlined
    def prefetch_second(j, begin, smem, strides):
        """With one stage: wait for K of tile j and start the copies of V of the next one, tile j - 1."""
        places = places_of(int32(j - 1), strides, smem.q)
        wait_all()
        cuda.syncthreads()  # K is there, and everyone is done with V
        if j > begin:
            load_values(places, 0, strides, smem, special.thread_index())
        cp_async.commit_group()

    @inlined
    def start_dp(acc_dp, q_smem, thread, score):
        """acc_dp <- -delta of each row, so that the product adds up to dP - delta; what counts more is multiplied with
        that later."""
        for r in range(rows):
            minus_delta = uint32(ld_st.load_b32(of_row(r, thread, q_smem) + 12)).view(np.float32)
            if drops:
                minus_delta /= score.kept_count
            for n in range(blocks):
                for x in range(2):
                    acc_dp[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x] = minus_delta

    @inlined
    def weigh(j, registers, q_smem, thread, term, arrays, sizes, score, masked):
        """ds_frag <- dS of key tile j in 16 bits. masked, a constant: some columns are not seen by some rows."""
        four = cuda.local.array(4, uint32)
        ds = cuda.local.array(2, float32)
        first_column = int32(j * int32(tile_n) + first_key_of(thread & int32(31), thread >> int32(5)))
        if drops:
            b, h = block_state.get(q_smem + int32(head_at))
            tile_pos, _ = block_state.get(q_smem + int32(keys_at))
            lane_row = (thread >> int32(5 + shift)) * warp_rows + int32(first_row_of(thread & int32(31)))
            kept_of(registers.kept, first_column, b, int32(h), lane_row, tile_pos, arrays, sizes)
        for r in range(rows):
            ld_st.load_v4(four, 0, of_row(r, thread, q_smem))
            seen = uint32(0)
            if masked:
                first, end = int32(int32(four[0]) - first_column), int32(int32(four[1]) - first_column)
                seen = columns_within(first, end, 0)
            if has_mask:
                seen = seen & registers.shown_bits[r] if masked else registers.shown_bits[r]
            lse = four[2].view(np.float32)
            for n in range(blocks):
                block = (r // 2) * blocks + n
                at = block * 4 + (r % 2) * 2
                for x in range(2):
                    column = int32(n * 8 + x)
                    distance = registers.distance[r] - float32(column)
                    here = FragmentAt(term, distance, added(registers.loaded, r, n, x))
                    p, derivative = weight(registers.acc_s[at + x], here, score, lse)
                    bracket = registers.acc_dp[at + x]
                    if drops:
                        counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        bracket = bracket * score.kept_count if counts else four[3].view(np.float32)
                    ds[x] = p * bracket * derivative
                    if (masked or has_mask) and (seen >> uint32(2 * n + x)) & uint32(1) == 0:
                        ds[x] = float32(0)
                registers.ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @inlined
    def load_for_scores(j, registers, q_smem, arrays, strides, sizes, masked):
        """What the scores of tile j need from global memory, while they are computed."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bias, bits = block_state.get(q_smem + int32(origin_at))
        first_query, _ = block_state.get(q_smem + int32(tile_at))
        part_j = int32(j * groups + (warp & (groups - 1)))  # of the warp's part of the keys
        origin, inside = Origin(bias, bits, int32(first_query)), FALSE if masked else TRUE
        loaded, shown_bits, first_row = registers.loaded, registers.shown_bits, (warp >> shift) * warp_rows
        load_reads(loaded, shown_bits, part_j, origin, first_row, lane, arrays, strides, sizes, inside)

    @inlined
    def products_of_tile(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, masked):
        """dQ += what the key tile in stage `stage` gives."""
        acc_s, acc_dp, acc_dq, b_frag = registers.acc_s, registers.acc_dp, registers.acc_dq, registers.b_frag
        k_tile, v_tile = smem.k + stage * k_stage, smem.v + stage * v_stage
        for x in range(s_count):
            acc_s[x] = float32(0)
        if stages > 1:
            multiply_q_k(acc_s, registers.q_frag, b_frag, smem.q + lanes.own, k_tile + lanes.other)
        thread = special.thread_index()
        start_dp(acc_dp, smem.q, thread, score)
        multiply_do_v(acc_dp, registers.do_frag, b_frag, smem.do + lanes.own, v_tile + lanes.other)
        if stages == 1:  # K has come only now
            prefetch_second(j, begin, smem, strides)
            multiply_q_k(acc_s, registers.q_frag, b_frag, smem.q + lanes.own, k_tile + lanes.other)
        thread = special.thread_index()
        weigh(j, registers, smem.q, thread, term, arrays, sizes, score, masked)
        if groups > 1:
            warp, weights = thread >> int32(5), smem.q + int32(weights_at)
            first = (warp & (groups - 1)) * columns
            k_tile += lanes.transposed + (first >> 6) * (tile_n * 128)
            put(registers.ds_frag, weights, thread)
            own_product(acc_dq, registers.ds_frag, b_frag, k_tile, head_dim_padded - first, thread)
            bar.sync((warp >> shift) + 1, 32 * groups)
            others_product(
                acc_dq, registers.a_frag, b_frag, weights + lanes.own, k_tile, head_dim_padded - first, thread
            )
        else:
            multiply_ds_k(acc_dq, registers.ds_frag, b_frag, k_tile + lanes.transposed)

    @inlined
    def step(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, masked):
        """One key tile. masked, a constant: some row does not see some key."""
        if reads:
            load_for_scores(j, registers, smem.q, arrays, strides, sizes, masked)
        prefetch(j, stage, begin, smem, strides)
        if has_row_term:
            distances(j, special.thread_index(), smem.q, registers.distance)
        products_of_tile(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, masked)

    @cuda.jit
    def flash_attention_mma_dq(arrays, strides, sizes, score):
        thread = special.thread_index()
        tile, tile_keys = tile_of(special.block_index(), arrays, strides, sizes)
        queries_left = int32(min(sizes.seqlen_q - tile.first_query, tile_m))

        q_smem = aligned(shared.address(cuda.shared.array(0, uint8)))
        smem = Smem(
            q_smem,  # (tile_m, head_dim_padded)
            q_smem + int32(do_at),  # (tile_m, head_dim_v_padded)
            q_smem + int32(k_at),  # (stages, tile_n, head_dim_padded)
            q_smem + int32(v_at),  # (stages, tile_n, head_dim_v_padded)
        )
        own_lane, other_lane, transposed_lane = lanes_of(thread)
        lanes = Lanes(own_lane, other_lane, transposed_lane)

        top_first, top_end = row_keys(tile_keys.position, sizes.left, sizes.right, tile_keys.keys)
        last_pos = tile_keys.position + queries_left - 1
        bottom_first, bottom_end = row_keys(last_pos, sizes.left, sizes.right, tile_keys.keys)
        begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # tiles in which it shows nothing, before the first key that it shows and behind the last
            end_query = tile.first_query + queries_left
            first, end = ends_of(tile.b, tile.h, 1, tile.first_query, end_query, arrays, strides, sizes)
            begin = max(begin, divide(first, tile_n))
            stop = min(stop, divide(end + int32(tile_n - 1), tile_n))
        set_up_state(tile, tile_keys, (free, cut), arrays, strides, sizes, q_smem, thread)
        cuda.syncthreads()

        registers = Registers(
            cuda.local.array(s_count, float32),  # acc_s (strips, part / 8, 4)
            cuda.local.array(s_count, float32),  # acc_dp (strips, part / 8, 4)
            cuda.local.array(dq_count, float32),  # acc_dq (strips, head_dim_padded / 8, 4)
            cuda.local.array(frag_count, uint32),  # ds_frag (strips, part / 8, 2)
            cuda.local.array(q_count, uint32),  # q_frag (strips, head_dim_padded / 16, 4)
            cuda.local.array(do_count, uint32),  # do_frag (strips, head_dim_v_padded / 16, 4)
            cuda.local.array(a_count, uint32),  # a_frag (strips, 4): dS from shared memory
            cuda.local.array(4, uint32),  # b_frag (16, 16): K or V
            cuda.local.array(rows, float32),  # distance
            cuda.local.array(bias_words, uint32),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            cuda.local.array(bits_words, uint32),  # shown_bits
            cuda.local.array(kept_words, uint32),  # kept
        )
        for x in range(dq_count):
            registers.acc_dq[x] = float32(0)

        j, stage = int32(stop - 1), int32(0)  # stage: which stage is in use
        if j >= begin:
            q_global = memory.address(arrays.q, row_base(strides.q, tile.b, tile.h, tile.first_query))
            do_global = memory.address(arrays.do, row_base(strides.do, tile.b, tile.h, tile.first_query))
            load_q(smem.q, q_global, 2 * strides.q[2], 0, queries_left, head_dim, thread)
            load_do(smem.do, do_global, 2 * strides.do[2], 0, queries_left, head_dim_v, thread)
            places = places_of(j, strides, q_smem)
            load_values(places, stage, strides, smem, thread)
            if stages > 1:
                load_keys(places, stage, strides, smem, thread)
        cp_async.commit_group()
        term = row_term(tile.b, tile.h, arrays, strides)
        if in_registers:
            wait_all()
            cuda.syncthreads()
            load_q_frag(registers.q_frag, smem.q + lanes.own)
            load_do_frag(registers.do_frag, smem.do + lanes.own)

        whole = j >= free and j < cut
        while j >= begin:
            # Tiles that some row sees in part; then those that every row sees whole; then, behind a left window,
            # some of the first kind again.
            while j >= begin and not whole:
                step(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, TRUE)
                j, stage = int32(j - 1), int32(stage ^ other_stage)
                whole = is_unmasked(j, q_smem)
            while j >= begin and whole:
                step(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, FALSE)
                j, stage = int32(j - 1), int32(stage ^ other_stage)
                whole = is_unmasked(j, q_smem)

        # dQ to the place of the warp's own rows of Q, and from there to global memory. Where all this belongs is in the
        # state of the block: kept through the loop, it would cost the registers that S needs.
        wait_all()
        position, keys = block_state.get(q_smem + int32(keys_at))
        b, h = block_state.get(q_smem + int32(head_at))
        first_query, h_kv = block_state.get(q_smem + int32(tile_at))
        tile = QueryTile(int32(b), int32(h), int32(first_query), int32(0))
        tile_keys = TileKeys(int32(h_kv), int32(keys), position)
        queries_left = int32(min(sizes.seqlen_q - tile.first_query, tile_m))
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bar.sync((warp >> shift) + 1, 32 * groups)  # those who share these rows have read them for the last time
        first_row = int32((warp >> shift) * warp_rows)
        first_column = int32((warp & (groups - 1)) * columns)
        dq_smem, dq_left = q_smem + (first_column >> 6) * (tile_m * 128), int32(head_dim - first_column)
        nonfinite = uint32(0)
        if dq_left > 0:
            nonfinite |= stage_dq(registers.acc_dq, score.scale, dq_smem, first_row, lane, queries_left)
        if groups > 1:  # a row that is no number in one panel is computed again in all
            ld_st.store_b32(q_smem + int32(warps_at) + 4 * warp, nonfinite)
            bar.sync((warp >> shift) + 1, 32 * groups)
            for other in range(groups):
                nonfinite |= ld_st.load_b32(q_smem + int32(warps_at) + 4 * ((warp & int32(-groups)) + other))
        if dq_left > 0:
            base = row_base(strides.dq, tile.b, tile.h, tile.first_query) + first_column
            store_dq(dq_smem, first_row, lane, arrays.dq, base, strides.dq[2], queries_left, dq_left, nonfinite)
        if groups > 1:  # each warp of a group recomputes some
            share = warp_rows // groups
            nonfinite &= uint32((1 << share) - 1) << uint32((warp & (groups - 1)) * share)
        if nonfinite != 0:
            recompute_queries(nonfinite, first_row, lane, tile, tile_keys, term, arrays, strides, sizes, score)

    return flash_attention_mma_dq
