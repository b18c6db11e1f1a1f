"""The gradient of bias on tensor cores: dS of the finished scores, summed over the dimensions in which bias is
broadcast.

It computes what v2_backward_dbias.py computes, in 16 bits. A block owns a tile of bias' own elements and loops over the
tiles of scores that read them (kernels/steps/score_ranges.py). A lane adds up its elements of dS in registers, in that
order; at the end the block adds up lanes and warps. So every sum has one owner and one order.

Launch: grid (splits * bias' batch * heads * query tiles * key tiles). Rows are contiguous along dim, dbias as a whole.
"""

import math
from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import cvt, ld_st, local, memory, shared, shfl, special, vote
from ..score import fragments, user
from ..score.gradient_functions import LanePlace
from ..steps import elements, lse_delta, score_ranges
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, lane_and_warp, nothing, row_keys
from . import backward_scores, query_columns, score_tiles
from .backward_scores import RowState

# A lane's local arrays. Shapes are in the kernel.
Registers = namedtuple(
    "Registers", "acc_s acc_dp sums q_frag do_frag b_frag lse minus_delta distance loaded shown_bits kept"
)


def make(config):
    tile_m, tile_n, warps, plan = config.tile_m, config.tile_n, config.threads // 32, config.shared_layout()
    blocks, rows, count, inf = tile_n // 8, 2, tile_n // 2, float32(math.inf)
    tiles, tiles_of, columns = score_tiles.make(config), score_ranges.of_bias(config), query_columns.make(config)
    chain, scores, has_functions = fragments.chain(config), backward_scores.make(config), user.present(config)
    read, kept_weight, delta_first, has_mask = scores.read, scores.kept_weight, config.delta_first, config.has("mask")
    always_masked = has_mask or has_functions
    dtype = "float32" if config.split else config.dtype_of("bias")
    store, pack = elements.storer(dtype), cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def copy_rows(place, smem, arrays, sizes):
        """Starts the copies of lse and delta of the tile's queries."""
        head = columns.head_at(place.sequence, place.h, arrays, sizes)
        columns.start(place.i, head, smem.rows, place.sequence.seqlen_q, arrays)

    @inlined
    def keep_bias(own, registers, smem, thread, arrays, strides, sizes):
        """Loads the bias of the block's own tile, which all its scores share. A lane keeps that of its scores in shared
        memory: in registers it would take those that the compiler needs."""
        origin = read.origin(own.b, own.h, int32(own.i * tile_m), arrays, strides)
        lane, warp = lane_and_warp()
        read.load_bias(registers.loaded, own.j, origin, int32(warp * 16), lane, strides, sizes, FALSE)
        for n in range(0, read.bias_words, 4):
            ld_st.store_v4(kept_bias(smem, thread, n), registers.loaded, n)

    @inlined
    def kept_bias(smem, thread, n):
        """Where the lane's words n to n + 3 are."""
        return int32(smem.begin + int32(plan.bias + 4 * config.threads * n) + 16 * thread)

    @inlined
    def read_mask(place, registers, smem, thread, arrays, strides, sizes):
        """Loads a mask's bits of the scores, before their products are ready."""
        origin = read.origin(place.sequence.b, place.h, int32(place.i * tile_m), arrays, strides)
        lane, warp = lane_and_warp()
        bits, first_row = registers.shown_bits, int32(warp * 16)
        read.load_bits(bits, place.j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def multiply(place, registers, smem, thread, score):
        """acc_s, acc_dp <- Q K^T, and dO V^T - delta."""
        for r in range(rows):
            at = smem.rows + 4 * int32(lse_delta.place(scores.own_row() + r * 8))
            registers.lse[r] = ld_st.load_b32(at).view(np.float32)
            registers.minus_delta[r] = ld_st.load_b32(at + 4 * lse_delta.MINUS_DELTA).view(np.float32)
            for n in range(blocks):
                for x in range(2):
                    if delta_first:
                        scores.add_delta(r, n, x, registers, registers.minus_delta[r], score)
                    else:
                        registers.acc_dp[n * 4 + r * 2 + x] = float32(0)
        tiles.multiply(registers, smem, thread)

    @inlined
    def lane_place(place):
        """-> LanePlace of the lane's scores."""
        sequence, first_key = place.sequence, scores.first_column(place.j)
        first_query = int32(place.i * tile_m + scores.own_row())
        return LanePlace(int64(sequence.b), int64(place.h), first_query, sequence.q_start, first_key)

    @inlined
    def show(place, registers, arrays, strides, sizes, score):
        """shown_bits <- the bits of the scores that count."""
        sequence, first_query = place.sequence, int32(place.i * tile_m + scores.own_row())
        for r in range(rows):
            query = int32(first_query + r * 8)
            first, end = row_keys(sequence.q_start + query, sizes.left, sizes.right, sequence.keys)
            if query >= sequence.seqlen_q:
                end = first
            scores.show_seen(r, place.j, RowState(int32(first), int32(end), inf, inf), registers)
        if has_functions:
            scores.apply(lane_place(place), TRUE, registers, arrays, strides, score)

    @inlined
    def add(registers, term, score, masked):
        """sums += dS. masked, a constant: some scores do not count, or are those of a query that sees no key."""
        for r in range(rows):
            for n in range(blocks):
                for x in range(2):
                    at, lse, seen = n * 4 + r * 2 + x, registers.lse[r], registers.shown_bits[r]
                    if not delta_first:
                        scores.add_delta(r, n, x, registers, registers.minus_delta[r], score)
                    p = scores.weigh(r, n, x, registers, term, lse, seen, score, masked)
                    if not masked or p != 0:
                        registers.sums[at] += registers.acc_dp[at]

    @inlined
    def add_scores(place, registers, smem, thread, arrays, strides, sizes, score):
        """sums += dS of a tile whose products are ready."""
        if kept_weight.present:
            scores.find_kept(lane_place(place), registers, arrays, sizes)
        term = float32(0)
        if chain.has_row_term:
            scores.find_distances(lane_place(place), registers)
            term = chain.row_term(place.sequence.b, place.h, arrays, strides)
        for n in range(0, read.bias_words, 4):
            ld_st.load_v4(registers.loaded, n, kept_bias(smem, thread, n))
        whole = not always_masked and place.j >= place.free and place.j < place.cut
        if whole:
            no_key = registers.lse[0] == inf or registers.lse[1] == inf
            whole = vote.any_lane(uint32(1) if no_key else uint32(0)) == 0
        if whole:
            add(registers, term, score, FALSE)
        else:
            show(place, registers, arrays, strides, sizes, score)
            add(registers, term, score, TRUE)

    over_tiles = tiles.loop(copy_rows, read_mask if has_mask else nothing, multiply, add_scores)

    @inlined
    def over_keys(registers):
        """sums[0], sums[2] <- for the lane's two rows the sum over all columns, in every lane of the row."""
        for r in range(rows):
            total = float32(0)
            for n in range(blocks):
                total += registers.sums[n * 4 + r * 2] + registers.sums[n * 4 + r * 2 + 1]
            total += shfl.bfly_f32(total, 1)
            registers.sums[r * 2] = total + shfl.bfly_f32(total, 2)

    @inlined
    def over_rows(registers, sums_smem, thread, columns):
        """Stores in shared memory the sums over a warp's rows of `columns` blocks of 8 columns."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for n in range(columns):
            for x in range(2):
                total = registers.sums[n * 4 + x] + registers.sums[n * 4 + 2 + x]
                for distance in (4, 8, 16):
                    total += shfl.bfly_f32(total, distance)
                if lane < 4:
                    at = sums_smem + 4 * int32(warp * tile_n + n * 8 + int32(first_column_of(lane)) + x)
                    ld_st.store_b32(at, float32(total).view(np.uint32))

    @inlined
    def store_tile(registers, target, by, base, first_query, first_key, thread, sizes):
        """Stores a tile of dbias in which no rows or keys are summed. by: the strides of target."""
        lane, warp = thread & int32(31), thread >> int32(5)
        for r in range(rows):
            query = first_query + int64(warp * 16 + int32(first_row_of(lane)) + r * 8)
            if query < sizes.seqlen_q:
                of_row = base + query * by[2]
                for n in range(blocks):
                    key = first_key + int64(n * 8 + int32(first_column_of(lane)))
                    low, high = registers.sums[n * 4 + r * 2], registers.sums[n * 4 + r * 2 + 1]
                    if config.pairs:
                        if key < sizes.seqlen_k:
                            memory.store_b32(memory.address(target, of_row + key), pack(low, high))
                    else:
                        if key < sizes.seqlen_k:
                            store(target, of_row + key, low)
                        if key + 1 < sizes.seqlen_k:
                            store(target, of_row + key + 1, high)

    @inlined
    def store_sums(registers, target, by, base, first_query, first_key, sums_smem, thread, sizes):
        """Likewise if rows or keys are summed."""
        lane, warp = thread & int32(31), thread >> int32(5)
        if config.keys_summed:
            over_keys(registers)
        if config.rows_summed:
            over_rows(registers, sums_smem, thread, 1 if config.keys_summed else blocks)
            cuda.syncthreads()
            key = first_key + int64(thread)
            if thread < (1 if config.keys_summed else tile_n) and key < sizes.seqlen_k:
                total = float32(0)
                for other in range(warps):
                    total += ld_st.load_b32(sums_smem + 4 * int32(other * tile_n + thread)).view(np.float32)
                store(target, base + key * by[3], total)
        elif lane & 3 == 0:
            for r in range(rows):
                query = first_query + int64(warp * 16 + int32(first_row_of(lane)) + r * 8)
                if query < sizes.seqlen_q:
                    store(target, base + query * by[2], registers.sums[r * 2])

    @cuda.jit
    def flash_attention_mma_dbias(arrays, strides, sizes, score):
        thread = special.thread_index()
        own, split = tiles_of.own_range(special.block_index(), sizes)
        smem = tiles.places(shared.address(cuda.shared.array(0, uint8)))
        registers = Registers(
            local.array(count, float32),  # acc_s (tile_n / 8, 4)
            local.array(count, float32),  # acc_dp (tile_n / 8, 4)
            local.array(count, float32),  # sums (tile_n / 8, 4)
            local.array(tiles.q_words, uint32),  # q_frag (head_dim_padded / 16, 4)
            local.array(tiles.do_words, uint32),  # do_frag (head_dim_v_padded / 16, 4)
            local.array(4, uint32),  # b_frag (16, 16): K or V
            local.array(rows, float32),  # lse, in the scores' units
            local.array(rows, float32),  # minus_delta
            local.array(rows, float32),  # distance: q_pos - k_pos of each row at the lane's first column
            local.array(read.bias_words, uint32),  # loaded
            local.array(rows, uint32),  # shown_bits
            local.array(kept_weight.words, uint32),  # kept
        )
        for x in range(count):
            registers.sums[x] = float32(0)

        keep_bias(own, registers, smem, thread, arrays, strides, sizes)
        over_tiles(own, registers, smem, thread, arrays, strides, sizes, score)
        target, by, base = tiles_of.target_of(own, split, arrays, strides, sizes)
        first_query, first_key = int64(own.i) * tile_m, int64(own.j) * tile_n
        if config.rows_summed or config.keys_summed:
            at = smem.begin + int32(plan.sums)
            store_sums(registers, target, by, base, first_query, first_key, at, thread, sizes)
        else:
            store_tile(registers, target, by, base, first_query, first_key, thread, sizes)

    return flash_attention_mma_dbias
