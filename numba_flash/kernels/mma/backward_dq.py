"""dQ on tensor cores: mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read mma/forward and mma/backward_dkdv first. It is listing 8 of docs/algorithm.md. A block owns a query tile of one
head. It loops over the key tiles that the queries see, like the forward, but without an online softmax: lse is known. A
warp owns `warp_rows` queries and computes

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                   line 6
    dP = dO V^T    dS = P * (dP - delta)                             lines 7 and 8
    dQ += dS K                         and at the end dQ *= scale    lines 9 and 10

The elements of dS that a lane holds are, rounded to 16 bits, those it needs of the A operand of dS K, so dS never
leaves the registers. With `column_groups` warps share queries and exchange dS, as in mma/backward_dkdv. With one stage
K and V take turns as Q and dO do there: the next V is loaded while dQ is summed up from K, and the next K while dP is
computed from V.

Letters as in v2. The keys that a query sees, its lse and its -delta are in shared memory.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dq is contiguous.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from ...ptx import bar, cp_async, cvt, ld_st, local, memory, shared, special
from ..recompute import queries as recompute
from ..score import fragments, gradient_functions, kept_weights
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.stage import FragmentAt
from ..steps import async_tiles, fragment_products, gradient_rows
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.query_tile import QueryTile
from ..steps.sequence import key_range, query_row
from . import backward_dq_walk, work_tile


class Registers(NamedTuple):
    """A warp's parts of S, dP and dQ, and of operands. Shapes are in make()."""

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
    shown_bits: Any  # by the caller's mask, and by functions
    kept: Any  # which weights count (kernels/score/kept_weights.py)


class Smem(NamedTuple):
    """Shared addresses: the block's own Q and dO, and the stages of K and V."""

    q: int
    do: int
    k: int
    v: int


class Lanes(NamedTuple):
    """The lane's matrix rows in a tile: of the block's own rows, of keys, and of keys transposed."""

    own: int
    other: int
    transposed: int


def make(config):
    head_dim, head_dim_padded, head_dim_v_padded = config.head_dim, config.head_dim_padded, config.head_dim_v_padded
    plan = config.shared_layout()
    stages, other_stage = config.stages, config.stages - 1
    k_stage, v_stage = (plan.v - plan.k) // stages, (plan.weights - plan.v) // stages  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = config.tile_n // groups  # keys of a tile for which a warp computes scores
    strips, blocks, rows = config.warp_rows // 16, part // 8, config.warp_rows // 8
    columns = config.group_columns
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    dq_count = strips * (head_dim_padded if groups == 1 else columns) // 2
    q_count, do_count, a_count = strips * head_dim_padded // 4, strips * head_dim_v_padded // 4, 4 * strips

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_q, load_do = (
        async_tiles.loader(config.tile_m, head_dim_padded, config.threads),
        async_tiles.loader(config.tile_m, head_dim_v_padded, config.threads),
    )
    load_k, load_v = (
        async_tiles.loader(config.tile_n, head_dim_padded, config.threads),
        async_tiles.loader(config.tile_n, head_dim_v_padded, config.threads),
    )
    work_of = work_tile.of_queries(config, config.tile_m)
    walk, has_functions = backward_dq_walk.make(config), gradient_functions.present(config)
    next_tile, states_ends, has_states = walk.next_tile, walk.states_ends, bool(config.tile_states)
    chain, (weight, _) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = score_reads.make(config, strips, part), config.has("mask")
    bits_words = rows if has_functions else read.bits_words
    drops, kept_words, *_ = kept_weights.on_fragments(config, strips, part)
    finishes = drops and has_functions  # dP - delta, before it is multiplied by their derivative
    lanes_of, load_own, scores_product, gradient_product, *shared_by_warps = fragment_products.make(config)
    put, own_product, others_product = shared_by_warps
    load_q_frag, load_do_frag = load_own(head_dim_padded), load_own(head_dim_v_padded)
    multiply_q_k, multiply_do_v = scores_product(head_dim_padded), scores_product(head_dim_v_padded)
    multiply_ds_k = gradient_product(head_dim_padded)
    stage_dq, store_dq = gradient_rows.make(
        config.dtype, config.tile_m, config.warp_rows, head_dim if groups == 1 else columns, head_dim % 8 == 0
    )
    recompute_queries = recompute.make(config)
    wait_all = cp_async.wait_group(0)

    @inlined
    def aligned(address):
        return int32((address + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))

    @inlined
    def load_keys(places, stage, strides, smem, thread):
        """Start the copies of K of a key tile to stage `stage`."""
        load_k(smem.k + stage * k_stage, places[0], 2 * strides.k[2], 0, places[2], head_dim, thread)

    @inlined
    def load_values(places, stage, strides, smem, thread):
        """Start the copies of V of a key tile to stage `stage`."""
        load_v(smem.v + stage * v_stage, places[1], 2 * strides.v[2], 0, places[2], config.head_dim_v, thread)

    @inlined
    def prefetch(j, stage, begin, smem, arrays, strides):
        """Wait for V of tile j, with two stages also for K, and start the copies for which there is room now."""
        next_j = next_tile(j, begin, smem.q, arrays, strides)
        places = walk.places_of(j if stages == 1 else next_j, strides, smem.q)
        wait_all()
        cuda.syncthreads()  # it has arrived, and all threads have finished with the last tile
        if stages == 1:
            load_keys(places, stage, strides, smem, special.thread_index())
        elif next_j >= begin:
            load_keys(places, int32(stage ^ 1), strides, smem, special.thread_index())
            load_values(places, int32(stage ^ 1), strides, smem, special.thread_index())
        cp_async.commit_group()

    @inlined
    def prefetch_second(j, begin, smem, arrays, strides):
        """With one stage: wait for K of tile j and start the copies of V of the next one."""
        next_j = next_tile(j, begin, smem.q, arrays, strides)
        places = walk.places_of(next_j, strides, smem.q)
        wait_all()
        cuda.syncthreads()  # K has arrived, and all threads have finished with V
        if next_j >= begin:
            load_values(places, 0, strides, smem, special.thread_index())
        cp_async.commit_group()

    @inlined
    def weigh(j, registers, q_smem, thread, term, arrays, sizes, score, masked):
        """ds_frag <- dS of key tile j in 16 bits. masked, a constant: some columns are not seen by some rows."""
        four = local.array(4, uint32)
        ds = local.array(2, float32)
        first_column = int32(j * int32(config.tile_n) + walk.first_key_of(thread & int32(31), thread >> int32(5)))
        if drops and not finishes:
            walk.find_kept(first_column, registers.kept, q_smem, thread, arrays, sizes)
        for r in range(rows):
            ld_st.load_v4(four, 0, walk.of_row(r, thread, q_smem))
            seen = uint32(0)
            if has_functions:
                seen = registers.shown_bits[r]
            elif masked:
                first, end = int32(int32(four[0]) - first_column), int32(int32(four[1]) - first_column)
                seen = columns_within(first, end, 0)
            if has_mask and not has_functions:
                seen = seen & registers.shown_bits[r] if masked else registers.shown_bits[r]
            lse = four[2].view(np.float32)
            for n in range(blocks):
                block = (r // 2) * blocks + n
                at = block * 4 + (r % 2) * 2
                for x in range(2):
                    column = int32(n * 8 + x)
                    distance = registers.distance[r] - float32(column)
                    here = FragmentAt(term, distance, read.added(registers.loaded, r, n, x))
                    p, derivative = weight(registers.acc_s[at + x], here, score, lse)
                    bracket = registers.acc_dp[at + x]
                    if drops and not finishes:
                        counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        bracket = bracket * score.kept_count if counts else four[3].view(np.float32)
                    ds[x] = p * bracket * derivative
                    if (masked or has_mask) and (seen >> uint32(2 * n + x)) & uint32(1) == 0:
                        ds[x] = float32(0)
                registers.ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @inlined
    def products_of_tile(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, masked):
        """dQ += the contribution of the key tile in stage `stage`."""
        acc_s, acc_dp, acc_dq, b_frag = registers.acc_s, registers.acc_dp, registers.acc_dq, registers.b_frag
        k_tile, v_tile = smem.k + stage * k_stage, smem.v + stage * v_stage
        for x in range(s_count):
            acc_s[x] = float32(0)
        if stages > 1:
            multiply_q_k(acc_s, registers.q_frag, b_frag, smem.q + lanes.own, k_tile + lanes.other)
        thread = special.thread_index()
        walk.start_dp(acc_dp, smem.q, thread, score)
        multiply_do_v(acc_dp, registers.do_frag, b_frag, smem.do + lanes.own, v_tile + lanes.other)
        if stages == 1:  # K arrives only now
            prefetch_second(j, begin, smem, arrays, strides)
            multiply_q_k(acc_s, registers.q_frag, b_frag, smem.q + lanes.own, k_tile + lanes.other)
        thread = special.thread_index()
        if finishes:
            first_column = int32(j * int32(config.tile_n) + walk.first_key_of(thread & int32(31), thread >> int32(5)))
            walk.find_kept(first_column, registers.kept, smem.q, thread, arrays, sizes)
            walk.finish_dp(registers, smem.q, thread, score)
        if has_functions and masked:
            walk.ask_functions(j, registers, smem.q, arrays, strides, score)
        weigh(j, registers, smem.q, thread, term, arrays, sizes, score, masked)
        if groups > 1:
            warp, weights = thread >> int32(5), smem.q + int32(plan.weights)
            first = (warp & (groups - 1)) * columns
            k_tile += lanes.transposed + (first >> 6) * (config.tile_n * 128)
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
        if read.reads:
            walk.load_for_scores(j, registers, smem.q, arrays, strides, sizes, masked)
        prefetch(j, stage, begin, smem, arrays, strides)
        if chain.has_row_term:
            walk.distances(j, special.thread_index(), smem.q, registers.distance)
        products_of_tile(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, masked)

    @cuda.jit
    def flash_attention_mma_dq(arrays, strides, sizes, score):
        thread = special.thread_index()
        tile = work_of(special.block_index(), arrays, strides, sizes)
        sequence = tile.sequence
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.tile_m))

        q_smem = aligned(shared.address(cuda.shared.array(0, uint8)))
        smem = Smem(
            q_smem,  # (tile_m, head_dim_padded)
            q_smem + int32(plan.do),  # (tile_m, head_dim_v_padded)
            q_smem + int32(plan.k),  # (stages, tile_n, head_dim_padded)
            q_smem + int32(plan.v),  # (stages, tile_n, head_dim_v_padded)
        )
        own_lane, other_lane, transposed_lane = lanes_of(thread)
        lanes = Lanes(own_lane, other_lane, transposed_lane)

        end_query = tile.first_query + queries_left
        begin_, free_, cut_, stop_ = key_range(sequence, tile.first_query, end_query - 1, sizes, config.tile_n)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the key tiles before the first and after the last in which it leaves a key
            first, end, _, _ = read.ranges(sequence.b, tile.h, 1, tile.first_query, end_query, arrays, strides, sizes)
            begin = max(begin, divide(first, config.tile_n))
            stop = max(min(stop, divide(end + int32(config.tile_n - 1), config.tile_n)), begin)
        if has_states:
            begin, stop = states_ends(tile, begin, stop, arrays, strides)
        walk.set_up_state(tile, (free, cut), arrays, strides, sizes, q_smem, thread)
        cuda.syncthreads()

        registers = Registers(
            local.array(s_count, float32),  # acc_s (strips, part / 8, 4)
            local.array(s_count, float32),  # acc_dp (strips, part / 8, 4)
            local.array(dq_count, float32),  # acc_dq (strips, head_dim_padded / 8, 4)
            local.array(frag_count, uint32),  # ds_frag (strips, part / 8, 2)
            local.array(q_count, uint32),  # q_frag (strips, head_dim_padded / 16, 4)
            local.array(do_count, uint32),  # do_frag (strips, head_dim_v_padded / 16, 4)
            local.array(a_count, uint32),  # a_frag (strips, 4): dS from shared memory
            local.array(4, uint32),  # b_frag (16, 16): K or V
            local.array(rows, float32),  # distance
            local.array(read.bias_words, uint32),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            local.array(bits_words, uint32),  # shown_bits
            local.array(kept_words, uint32),  # kept
        )
        for x in range(dq_count):
            registers.acc_dq[x] = float32(0)

        j, stage = int32(stop - 1), int32(0)  # stage: which stage is in use
        if j >= begin:
            q_global = memory.address(arrays.q, query_row(strides.q, sequence, tile.h, tile.first_query))
            do_global = memory.address(arrays.do, query_row(strides.do, sequence, tile.h, tile.first_query))
            load_q(smem.q, q_global, 2 * strides.q[2], 0, queries_left, head_dim, thread)
            load_do(smem.do, do_global, 2 * strides.do[2], 0, queries_left, config.head_dim_v, thread)
            places = walk.places_of(j, strides, q_smem)
            load_values(places, stage, strides, smem, thread)
            if stages > 1:
                load_keys(places, stage, strides, smem, thread)
        cp_async.commit_group()
        term = chain.row_term(sequence.b, tile.h, arrays, strides)
        if config.in_registers:
            wait_all()
            cuda.syncthreads()
            load_q_frag(registers.q_frag, smem.q + lanes.own)
            load_do_frag(registers.do_frag, smem.do + lanes.own)

        whole = j >= free and j < cut and not has_functions
        if has_states:
            whole = walk.is_unmasked(j, q_smem, arrays, strides)
        while j >= begin:
            # Key tiles that some row sees only in part; then those that every row sees whole; then, with a left window,
            # again some that are seen in part.
            while j >= begin and not whole:
                step(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, TRUE)
                j, stage = next_tile(j, begin, q_smem, arrays, strides), int32(stage ^ other_stage)
                whole = walk.is_unmasked(j, q_smem, arrays, strides)
            while j >= begin and whole:
                step(j, stage, begin, registers, smem, lanes, term, arrays, strides, sizes, score, FALSE)
                j, stage = next_tile(j, begin, q_smem, arrays, strides), int32(stage ^ other_stage)
                whole = walk.is_unmasked(j, q_smem, arrays, strides)

        # Stage dQ in the place of the warp's own rows of Q, and write it from there to global memory. Its place there
        # is in the state of the block: kept in registers through the loop, it would take those that S needs.
        wait_all()
        tile = walk.work_again(q_smem, sizes)
        queries_left = int32(min(tile.sequence.seqlen_q - tile.first_query, config.tile_m))
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bar.sync((warp >> shift) + 1, 32 * groups)  # all warps that share these rows have read them for the last time
        first_row = int32((warp >> shift) * config.warp_rows)
        first_column = int32((warp & (groups - 1)) * columns)
        dq_smem, dq_left = q_smem + (first_column >> 6) * (config.tile_m * 128), int32(head_dim - first_column)
        nonfinite = uint32(0)
        if dq_left > 0:
            nonfinite |= stage_dq(registers.acc_dq, score.scale, dq_smem, first_row, lane, queries_left)
        if groups > 1:  # a row that is not finite in one panel is computed again in all
            ld_st.store_b32(q_smem + int32(plan.warps) + 4 * warp, nonfinite)
            bar.sync((warp >> shift) + 1, 32 * groups)
            for other in range(groups):
                nonfinite |= ld_st.load_b32(q_smem + int32(plan.warps) + 4 * ((warp & int32(-groups)) + other))
        if dq_left > 0:
            base = query_row(strides.dq, tile.sequence, tile.h, tile.first_query) + first_column
            store_dq(dq_smem, first_row, lane, arrays.dq, base, strides.dq[2], queries_left, dq_left, nonfinite)
        if groups > 1:  # each warp of a group recomputes some
            share = config.warp_rows // groups
            nonfinite &= uint32((1 << share) - 1) << uint32((warp & (groups - 1)) * share)
        if nonfinite != 0:
            own = QueryTile(tile.sequence.b, tile.h, tile.first_query, tile.part)
            recompute_queries(nonfinite, first_row, lane, own, term, arrays, strides, sizes, score)

    return flash_attention_mma_dq
