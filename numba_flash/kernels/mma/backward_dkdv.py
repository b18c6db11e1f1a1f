"""dK and dV on tensor cores: mma.sync, ldmatrix, cp.async; since Ampere (sm_80).

Read mma/forward first. It is listing 7 of docs/algorithm.md. A block owns a key tile of one KV head. It loops over the
query tiles that see it, for each query head of the group, and holds the sums dK and dV in registers: no atomics, the
same bits in every run. A warp owns `warp_rows` keys. Scores are computed transposed:

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)               line 6
    dP^T = V dO^T   dS^T = P^T * (dP^T - delta)                       lines 7 and 9
    dV += P^T dO    dK += dS^T Q        and at the end dK *= scale    lines 10 to 12

The elements of P^T and dS^T that a lane holds are, rounded to 16 bits, those it needs of the A operand of dV and dK. So
neither leaves the registers. If the sums of whole rows do not fit in registers, `column_groups` warps own the same
keys. Each computes P^T and dS^T for its part of the queries, they exchange them in shared memory, and each sums up some
panels of 64 columns of dK and of dV.

A query tile has two halves: Q, and dO with lse and delta of its rows. With two stages both are loaded during the
products of the previous tile. One stage has room for twice as many queries, so each element of K and V that a warp
reads from shared memory is used twice as often. Then the halves take turns: the next dO is loaded while dK is summed up
from Q, and the next Q while dP is computed from dO. So dP is the first product of a tile then, and S the second.

FlashAttention (Dao et al., 2022, section 3 and appendix B) introduced the recomputation of P from lse, and delta =
rowsum(dO * O) in the derivative of the softmax.

Letters as in v2; acc_s, acc_dp, acc_dk and acc_dv are float32 accumulators; lse and -delta are laid out as in
kernels/steps/lse_delta.py.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dk and dv are contiguous.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, cp_async, cvt, ld_st, local, memory, shared, special
from ..recompute import keys as recompute
from ..score import fragments, gradient_functions, kept_weights
from ..score import reads as score_reads
from ..score.stage import FragmentAt
from ..steps import async_tiles, fragment_products, gradient_rows, lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.sequence import key_row, query_range
from . import backward_own_dq, backward_walk, row_delta, work_tile


class Registers(NamedTuple):
    """A warp's parts of S^T, dP^T, dK and dV, and of operands. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    acc_dk: Any
    acc_dv: Any
    p_frag: Any
    ds_frag: Any
    k_frag: Any
    v_frag: Any
    a_frag: Any
    b_frag: Any
    loaded: Any  # what its scores need from global memory (kernels/score/reads.py)
    shown_bits: Any  # by the caller's mask, and by functions
    kept: Any  # which weights count (kernels/score/kept_weights.py)


class Smem(NamedTuple):
    """Shared addresses: the block's own K and V, and the stages of Q, of dO, and of lse with -delta."""

    k: int
    v: int
    q: int
    do: int
    rows: int


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    of_dk, of_dv, in_registers = config.of_dk, config.of_dv, config.in_registers
    plan = config.shared_layout()
    dv_at = plan.v if of_dk else 0  # where dV is staged
    stages, other_stage = config.stages, config.stages - 1
    q_stage, do_stage = (plan.do - plan.q) // stages, (plan.rows - plan.do) // stages  # bytes
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_m // groups  # queries of a tile for which a warp computes scores
    rows_stage, row_chunks = 8 * tile_m, tile_m // 2  # of lse and -delta of a tile's queries: bytes, 16 at a time
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    s_count, frag_count = strips * blocks * 4, strips * blocks * 2
    columns = config.group_columns  # columns that a warp sums up
    dk_columns, dv_columns = (head_dim_padded, head_dim_v_padded) if groups == 1 else (columns, columns)
    dk_count, dv_count = strips * dk_columns // 2 if of_dk else 1, strips * dv_columns // 2 if of_dv else 1
    k_count, v_count = strips * head_dim_padded // 4, strips * head_dim_v_padded // 4 if of_dk else 1
    row_steps, a_count = -(-row_chunks // threads), 4 * strips

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_k, load_q = (async_tiles.loader(tile, head_dim_padded, threads) for tile in (tile_n, tile_m))
    load_v, load_do = (async_tiles.loader(tile, head_dim_v_padded, threads) for tile in (tile_n, tile_m))
    work_of, walk = work_tile.of_keys(config), backward_walk.make(config)
    has_functions, has_states = gradient_functions.present(config), bool(config.tile_states)
    has_row_term, (weight, _) = fragments.chain(config).has_row_term, fragments.weights_at(config)
    read, has_mask = score_reads.make(config, strips, part, of_keys=True), config.has("mask")
    bits_words = rows if has_functions else read.bits_words
    drops, kept_words, *_ = kept_weights.on_fragments(config, strips, part)
    lanes_of, load_own, scores_product, gradient_product, *shared_by_warps = fragment_products.make(config)
    put, own_product, others_product = shared_by_warps
    load_k_frag, load_v_frag = load_own(head_dim_padded), load_own(head_dim_v_padded)
    multiply_k_q, multiply_v_do = scores_product(head_dim_padded), scores_product(head_dim_v_padded)
    multiply_p_do, multiply_ds_q = gradient_product(head_dim_v_padded), gradient_product(head_dim_padded)
    stored_dk, stored_dv = (config.head_dim, config.head_dim_v) if groups == 1 else (columns, columns)
    stage_dk, store_dk = gradient_rows.make(config.dtype, tile_n, warp_rows, stored_dk, config.head_dim % 8 == 0)
    stage_dv, store_dv = gradient_rows.make(config.dtype, tile_n, warp_rows, stored_dv, config.head_dim_v % 8 == 0)
    recompute_keys, wait_all = recompute.make(config, of_dk, of_dv), cp_async.wait_group(0)
    own_rows, lanes = (row_delta.make(config.preprocess), config.preprocess.lanes) if config.of_dq else (None, 1)
    write_dq = backward_own_dq.make(config) if config.of_dq else None
    row_blocks, start_dp = lse_delta.row_blocks, lse_delta.starter(config, strips, blocks)
    finish_dp = lse_delta.finisher(config, strips, blocks)
    finishes = drops and of_dk and has_functions  # before it is multiplied by their derivative

    @inlined
    def aligned(address):
        return int32((address + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))

    @inlined
    def load_rows(i, stage, base, smem, seqlen_q, thread):
        """Start the copies of lse and -delta of query tile i of a head to stage `stage`. base: the address of the
        head's blocks of rows."""
        for step in range(row_steps):
            chunk = int32(thread + step * threads)
            if chunk < row_chunks:
                here = int32(i * (tile_m // 16) + (chunk >> 3)) < row_blocks(seqlen_q)
                at = base + int64(4) * int32(i * (2 * tile_m) + chunk * 4)
                # This order of additions leaves nothing to be kept in a register between tiles.
                to = (
                    smem.rows + stage * rows_stage + 16 * chunk
                    if stages > 1
                    else smem.k + 16 * chunk + int32(plan.rows)
                )
                cp_async.copy16(to, at, 16 if here else 0)

    @inlined
    def compute_rows(work, arrays, strides, sizes, thread):
        """Stores lse and -delta of all queries of the group's heads in global memory, as backward_preprocess does."""
        sequence, group = work.sequence, divide(sizes.heads, sizes.heads_kv)
        of_head = row_blocks(sequence.seqlen_q) * 16
        row, lane = int32(thread // lanes), int32(thread % lanes)
        while row < group * of_head:
            member = divide(row, of_head)
            h, query = int32(work.h_kv * group + member), int32(row - member * of_head)
            lse, minus_delta = own_rows(sequence, h, query, lane, arrays, strides, sizes)
            if lane == 0:
                at = lse_delta.block_row(sequence, h, query, sizes)
                arrays.lse_delta[at], arrays.lse_delta[at + lse_delta.MINUS_DELTA] = lse, minus_delta
            row = int32(row + threads // lanes)
        cuda.syncthreads()  # all threads may read them

    @inlined
    def rows_of_part(thread):
        """The byte offset of the warp's part of the queries in a tile's lse and -delta."""
        return ((thread >> int32(5)) & (groups - 1)) * (8 * part)

    @inlined
    def weigh(i, registers, k_smem, rows_smem, thread, term, distance, score, masked):
        """p_frag, ds_frag <- P^T and dS^T of query tile i in 16 bits. masked, a constant: some keys are not seen."""
        four = local.array(4, uint32)
        deltas = local.array(4, uint32)
        p = local.array(2, float32)
        ds = local.array(2, float32)
        for r in range(rows):
            seen = uint32(0)
            if has_functions:
                seen = registers.shown_bits[r]
            elif masked:
                seen = walk.seen_columns(i, thread, r, k_smem)
            if has_mask and not has_functions:
                seen = seen & registers.shown_bits[r] if masked else registers.shown_bits[r]
            for n in range(blocks // 2):
                ld_st.load_v4(four, 0, rows_smem + n * 128 + ((thread & 3) << 4))
                if drops and of_dk and not finishes:
                    ld_st.load_v4(deltas, 0, rows_smem + n * 128 + 64 + ((thread & 3) << 4))
                for half in range(2):
                    block = (r // 2) * blocks + 2 * n + half
                    at = block * 4 + (r % 2) * 2
                    for x in range(2):
                        column = int32((2 * n + half) * 8 + x)
                        lse = four[half * 2 + x].view(np.float32)
                        bias = read.added(registers.loaded, r, 2 * n + half, x)
                        here = FragmentAt(term, distance[r] + float32(column), bias)
                        p[x], derivative = weight(registers.acc_s[at + x], here, score, lse)
                        counts = TRUE
                        if drops:
                            counts = (registers.kept[r] >> uint32(4 * n + 2 * half + x)) & uint32(1) != 0
                        if of_dk:
                            bracket = registers.acc_dp[at + x]
                            if drops and not finishes:
                                bracket *= score.kept_count
                                bracket = bracket if counts else deltas[half * 2 + x].view(np.float32)
                            ds[x] = p[x] * bracket * derivative
                        if drops:
                            p[x] = p[x] * score.kept_count if counts else float32(0)
                        if (masked or has_mask) and (seen >> uint32(4 * n + 2 * half + x)) & uint32(1) == 0:
                            p[x] = float32(0)
                            ds[x] = float32(0)  # dP may be NaN there
                    if of_dv:
                        registers.p_frag[block * 2 + r % 2] = pack(p[0], p[1])
                    if of_dk:
                        registers.ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @inlined
    def load_queries(i, stage, source, smem, strides, sizes, thread):
        """Start the copies of Q of query tile i, at address `source`, to stage `stage`."""
        rows_left = int32(int32(sizes.seqlen_q) - i * int32(tile_m))
        load_q(smem.q + stage * q_stage, source, 2 * strides.q[2], 0, rows_left, config.head_dim, thread)

    @inlined
    def load_others(i, stage, sources, smem, strides, sizes, thread):
        """Start the copies of dO, lse and -delta of query tile i to stage `stage`."""
        rows_left = int32(int32(sizes.seqlen_q) - i * int32(tile_m))
        load_do(smem.do + stage * do_stage, sources[0], 2 * strides.do[2], 0, rows_left, config.head_dim_v, thread)
        load_rows(i, stage, sources[1], smem, sizes.seqlen_q, thread)

    @inlined
    def prefetch(i, heads_left, stage, smem, arrays, strides, sizes):
        """Wait for dO of tile i, with two stages also for Q, and start the copies for which there is room now."""
        next_i, next_heads_left, next_stage = i, heads_left, stage
        if stages > 1:
            next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
            next_stage = int32(stage ^ 1)
            others = walk.others_at(next_i, next_heads_left, strides, sizes, smem.k)
        queries = walk.queries_at(next_i, next_heads_left, strides, smem.k)
        wait_all()
        cuda.syncthreads()  # it has arrived, and all threads have finished with the last tile
        if next_heads_left > 0 and not config.of_dq:  # then Q comes before
            thread = special.thread_index()
            load_queries(next_i, next_stage, queries, smem, strides, sizes, thread)
            if stages > 1:
                load_others(next_i, next_stage, others, smem, strides, sizes, thread)
        cp_async.commit_group()

    @inlined
    def prefetch_second(i, heads_left, smem, arrays, strides, sizes):
        """With one stage, after all threads have finished with dO of tile i: start the copies of the next dO."""
        next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
        others = walk.others_at(next_i, next_heads_left, strides, sizes, smem.k)
        cuda.syncthreads()
        if next_heads_left > 0:
            load_others(next_i, 0, others, smem, strides, sizes, special.thread_index())
        cp_async.commit_group()

    @inlined
    def scores_of_tile(stage, registers, smem, score):
        """S^T and dP^T - delta of the query tile in stage `stage`."""
        # The thread's number is read again, so that addresses are not computed ahead of the loop and kept in registers.
        acc_s, acc_dp, b_frag = registers.acc_s, registers.acc_dp, registers.b_frag
        thread = special.thread_index()
        own_lane, other_lane, _ = lanes_of(thread)
        for x in range(s_count):
            acc_s[x] = float32(0)
        if stages > 1:
            multiply_k_q(acc_s, registers.k_frag, b_frag, smem.k + own_lane, smem.q + stage * q_stage + other_lane)
        if of_dk:
            start_dp(acc_dp, smem.rows + stage * rows_stage + rows_of_part(thread), thread & int32(31), score)
            multiply_v_do(acc_dp, registers.v_frag, b_frag, smem.v + own_lane, smem.do + stage * do_stage + other_lane)
        if stages == 1:  # Q arrives only now
            wait_all()
            cuda.syncthreads()
            multiply_k_q(acc_s, registers.k_frag, b_frag, smem.k + own_lane, smem.q + stage * q_stage + other_lane)

    @inlined
    def first_own_column(thread):
        """The first of the columns of dK and dV that a warp sums up, if several warps share its rows."""
        return int32(((thread >> int32(5)) & (groups - 1)) * columns)

    @inlined
    def own_panels(thread):
        """The offset in a tile at which the lane's rows of those columns begin, for a transposed operand."""
        return int32((first_own_column(thread) >> 6) * (tile_m * 128) + lanes_of(thread)[2])

    @inlined
    def gradients_of_tile(i, heads_left, stage, registers, smem, term, distance, arrays, strides, sizes, score, masked):
        """dK and dV += the contribution of the query tile in stage `stage`."""
        acc_dk, acc_dv, a_frag, b_frag = registers.acc_dk, registers.acc_dv, registers.a_frag, registers.b_frag
        p_frag, ds_frag = registers.p_frag, registers.ds_frag
        thread = special.thread_index()
        rows_tile = smem.rows + stage * rows_stage + rows_of_part(thread)
        weigh(i, registers, smem.k, rows_tile, thread, term, distance, score, masked)
        q_tile, do_tile = smem.q + stage * q_stage, smem.do + stage * do_stage
        if groups > 1:
            # The thread's number is read again for each product, so that addresses are not kept in registers through
            # the others.
            weights, barrier = smem.k + int32(plan.weights), (thread >> int32(5) >> shift) + 1
            put(p_frag, weights, thread)
            own_columns = do_tile + own_panels(thread)
            own_product(acc_dv, p_frag, b_frag, own_columns, head_dim_v_padded - first_own_column(thread), thread)
            bar.sync(barrier, 32 * groups)
            thread = special.thread_index()
            own_columns, own_rows = do_tile + own_panels(thread), weights + lanes_of(thread)[0]
            others_product(
                acc_dv, a_frag, b_frag, own_rows, own_columns, head_dim_v_padded - first_own_column(thread), thread
            )
            if stages == 1:
                prefetch_second(i, heads_left, smem, arrays, strides, sizes)
            else:
                bar.sync(barrier, 32 * groups)  # all warps of the group have finished with P
            thread = special.thread_index()
            put(ds_frag, weights, thread)
            own_columns = q_tile + own_panels(thread)
            own_product(acc_dk, ds_frag, b_frag, own_columns, head_dim_padded - first_own_column(thread), thread)
            bar.sync(barrier, 32 * groups)
            thread = special.thread_index()
            own_columns, own_rows = q_tile + own_panels(thread), weights + lanes_of(thread)[0]
            others_product(
                acc_dk, a_frag, b_frag, own_rows, own_columns, head_dim_padded - first_own_column(thread), thread
            )
        else:
            _, _, other_transposed = lanes_of(thread)
            q_tile, do_tile = q_tile + other_transposed, do_tile + other_transposed
            if of_dv:
                multiply_p_do(acc_dv, p_frag, b_frag, do_tile)
            if stages == 1:
                prefetch_second(i, heads_left, smem, arrays, strides, sizes)
            if of_dk:
                multiply_ds_q(acc_dk, ds_frag, b_frag, q_tile)
            if config.of_dq:
                put(ds_frag, smem.k + int32(plan.weights), thread)
                cuda.syncthreads()  # dS^T is there, and all threads have finished with Q
                next_i, next_heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
                if next_heads_left > 0:
                    queries = walk.queries_at(next_i, next_heads_left, strides, smem.k)
                    load_queries(next_i, 0, queries, smem, strides, sizes, thread)
                work = walk.work_again(smem.k, sizes)
                h = int32((work.h_kv + 1) * divide(sizes.heads, sizes.heads_kv) - heads_left)
                write_dq(i, work.sequence, h, smem.k, thread, arrays, strides, sizes, score)

    @inlined
    def step(i, heads_left, stage, registers, smem, distance, arrays, strides, sizes, score, masked):
        """One query tile of one head. masked, a constant: some query does not see some key."""
        if read.reads:
            walk.load_for_scores(i, heads_left, registers, smem.k, arrays, strides, sizes, masked)
        prefetch(i, heads_left, stage, smem, arrays, strides, sizes)
        scores_of_tile(stage, registers, smem, score)
        if drops:
            walk.find_kept(i, heads_left, registers.kept, smem.k, special.thread_index(), arrays, sizes)
        if finishes:
            now = special.thread_index()
            rows_tile = smem.rows + stage * rows_stage + rows_of_part(now)
            finish_dp(registers.acc_dp, registers.kept, rows_tile, now & int32(31), score)
        if has_functions and masked:
            walk.ask_functions(i, heads_left, registers, smem.k, arrays, strides, score)
        term = float32(0)
        if has_row_term:
            term = walk.term_of(heads_left, smem.k, arrays, strides)
            walk.distances(i, special.thread_index(), smem.k, distance)
        gradients_of_tile(i, heads_left, stage, registers, smem, term, distance, arrays, strides, sizes, score, masked)

    @cuda.jit
    def flash_attention_mma_dkdv(arrays, strides, sizes, score):
        thread = special.thread_index()
        k_smem = aligned(shared.address(cuda.shared.array(0, uint8)))
        smem = Smem(
            k_smem,  # (tile_n, head_dim_padded)
            k_smem + int32(plan.v),  # (tile_n, head_dim_v_padded)
            k_smem + int32(plan.q),  # (stages, tile_m, head_dim_padded)
            k_smem + int32(plan.do),  # (stages, tile_m, head_dim_v_padded)
            k_smem + int32(plan.rows),  # (stages, tile_m)
        )
        work = work_of(special.block_index(), arrays, strides, sizes)
        if config.of_dq:
            compute_rows(work, arrays, strides, sizes, thread)
        sequence, h_kv, first_key = work.sequence, work.h_kv, work.first_key
        keys_left = int32(min(sequence.keys - first_key, tile_n))  # may be below 0
        group = divide(sizes.heads, sizes.heads_kv)
        begin_, free_, cut_, stop_ = query_range(sequence, first_key, first_key + keys_left - 1, sizes, tile_m)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the tiles before the first and after the last query to which it leaves a key
            h = h_kv * group
            end_key = first_key + max(keys_left, int32(1))
            first, end, _, _ = read.ranges(sequence.b, h, group, first_key, end_key, arrays, strides, sizes)
            begin = max(begin, divide(first, tile_m))
            stop = min(stop, divide(end + int32(tile_m - 1), tile_m))
        if config.of_dq:  # a query that sees no key has a dQ, too
            begin, stop = int32(0), divide(int32(sequence.seqlen_q) + int32(tile_m - 1), tile_m)
            if keys_left < tile_n:  # what does not exist is hidden: its K is 0, but its dS might be Inf
                free, cut = int32(0), int32(0)
        tiles = (begin, stop, free, cut)
        walk.set_up_state(work, tiles, arrays, strides, sizes, k_smem, thread)
        cuda.syncthreads()

        registers = Registers(
            local.array(s_count, float32),  # acc_s (strips, part / 8, 4)
            local.array(s_count, float32),  # acc_dp (strips, part / 8, 4)
            local.array(dk_count, float32),  # acc_dk (strips, dk_columns / 8, 4)
            local.array(dv_count, float32),  # acc_dv (strips, dv_columns / 8, 4)
            local.array(frag_count, uint32),  # p_frag (strips, part / 8, 2)
            local.array(frag_count, uint32),  # ds_frag (strips, part / 8, 2)
            local.array(k_count, uint32),  # k_frag (strips, head_dim_padded / 16, 4)
            local.array(v_count, uint32),  # v_frag (strips, head_dim_v_padded / 16, 4)
            local.array(a_count, uint32),  # a_frag (strips, 4): P^T or dS^T from shared memory
            local.array(4, uint32),  # b_frag (16, 16): Q or dO
            local.array(read.bias_words, uint32),  # loaded (2 * strips, part / 8, 2), in 16 bits two in one
            local.array(bits_words, uint32),  # shown_bits
            local.array(kept_words, uint32),  # kept
        )
        distance = local.array(rows, float32)
        for x in range(dk_count):
            registers.acc_dk[x] = float32(0)
        for x in range(dv_count):
            registers.acc_dv[x] = float32(0)

        # stage: which stage is in use; heads_left: heads of the group that are left.
        i, stage, heads_left, whole = begin, int32(0), int32(0), begin >= free and begin < cut and not has_functions
        if begin < stop and (config.of_dq or keys_left > 0):
            heads_left = group
            if has_states:
                i, heads_left = walk.from_tile(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)
        if heads_left > 0:
            k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
            load_k(smem.k, k_global, 2 * strides.k[2], 0, keys_left, config.head_dim, thread)
            if of_dk:
                v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
                load_v(smem.v, v_global, 2 * strides.v[2], 0, keys_left, config.head_dim_v, thread)
            if stages > 1 or config.of_dq:
                queries = walk.queries_at(i, heads_left, strides, smem.k)
                load_queries(i, stage, queries, smem, strides, sizes, thread)
            load_others(i, stage, walk.others_at(i, heads_left, strides, sizes, smem.k), smem, strides, sizes, thread)
        cp_async.commit_group()
        if in_registers:
            wait_all()
            cuda.syncthreads()
            own_lane, _, _ = lanes_of(thread)
            load_k_frag(registers.k_frag, smem.k + own_lane)
            if of_dk:
                load_v_frag(registers.v_frag, smem.v + own_lane)

        while heads_left > 0:
            # Query tiles of which some query does not see some key; then those that are seen whole; then, with a left
            # window, again some of the first kind; and all this for each head of the group.
            while heads_left > 0 and not whole:
                step(i, heads_left, stage, registers, smem, distance, arrays, strides, sizes, score, TRUE)
                stage = int32(stage ^ other_stage)
                i, heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)
            while heads_left > 0 and whole:
                step(i, heads_left, stage, registers, smem, distance, arrays, strides, sizes, score, FALSE)
                stage = int32(stage ^ other_stage)
                i, heads_left = walk.following(i, heads_left, smem.k, arrays, strides)
                whole = walk.is_unmasked(i, heads_left, smem.k, arrays, strides)

        # Stage dK and dV in the place of the warp's own rows of K and V, and write them from there to global memory.
        wait_all()
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        if config.of_dq:
            cuda.syncthreads()  # all warps have read K for the last time
        bar.sync((warp >> shift) + 1, 32 * groups)  # all warps that share these rows have read them for the last time
        first_row = int32((warp >> shift) * warp_rows)
        first_column = int32((warp & (groups - 1)) * columns)
        # From the state of the block: kept in registers through the loop, it would take those that S needs.
        work = walk.work_again(k_smem, sizes)
        sequence, h_kv, first_key = work.sequence, work.h_kv, work.first_key
        keys_left = int32(min(sequence.keys - first_key, tile_n))
        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n))
        own_panels = (first_column >> 6) * (tile_n * 128)
        dk_smem, dv_smem = k_smem + own_panels, k_smem + int32(dv_at) + own_panels
        dk_left, dv_left = int32(config.head_dim - first_column), int32(config.head_dim_v - first_column)
        nonfinite = uint32(0)
        if of_dk and dk_left > 0:
            nonfinite |= stage_dk(registers.acc_dk, score.scale, dk_smem, first_row, lane, keys_left)
        if of_dv and dv_left > 0:
            nonfinite |= stage_dv(registers.acc_dv, float32(1), dv_smem, first_row, lane, keys_left)
        if groups > 1:  # a row that is not finite in one panel is computed again in all
            ld_st.store_b32(k_smem + int32(plan.warps) + 4 * warp, nonfinite)
            bar.sync((warp >> shift) + 1, 32 * groups)
            for other in range(groups):
                nonfinite |= ld_st.load_b32(k_smem + int32(plan.warps) + 4 * ((warp & int32(-groups)) + other))
        if of_dk and dk_left > 0:
            base = key_row(strides.dk, sequence, h_kv, first_key) + first_column
            store_dk(dk_smem, first_row, lane, arrays.dk, base, strides.dk[2], rows_left, dk_left, nonfinite)
        if of_dv and dv_left > 0:
            base = key_row(strides.dv, sequence, h_kv, first_key) + first_column
            store_dv(dv_smem, first_row, lane, arrays.dv, base, strides.dv[2], rows_left, dv_left, nonfinite)
        if groups > 1:  # each warp of a group recomputes some
            share = warp_rows // groups
            nonfinite &= uint32((1 << share) - 1) << uint32((warp & (groups - 1)) * share)
        if nonfinite != 0:
            recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return flash_attention_mma_dkdv
