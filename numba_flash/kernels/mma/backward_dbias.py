"""The gradient of bias on tensor cores: dS of the finished scores, summed over the dimensions in which bias is
broadcast.

It computes what v2_backward_dbias.py computes, in 16 bits. A block owns a tile of bias' own elements and loops over the
tiles of scores that read them (kernels/steps/score_ranges.py). A lane adds up its elements of dS in registers, in that
order; at the end the block adds up lanes and warps. So every sum has one owner and one order.

Launch: grid (splits * bias' batch * heads * query tiles * key tiles). Rows are contiguous along dim, dbias as a whole.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import cvt, ld_st, local, memory, shared, shfl, special
from ..score import fragments, user
from ..score.gradient_functions import LanePlace
from ..steps import elements, lse_delta, score_ranges
from ..steps.inlined import TRUE, inlined, nothing
from ..steps.plain import first_column_of, first_row_of, row_keys
from . import backward_scores, score_tiles
from .backward_scores import RowState


class Registers(NamedTuple):
    """A warp's registers. Shapes are in make()."""

    acc_s: Any
    acc_dp: Any
    sums: Any
    q_frag: Any
    do_frag: Any
    b_frag: Any
    distance: Any
    loaded: Any
    shown_bits: Any
    kept: Any


def make(config):
    tile_m, tile_n, warps, plan = config.tile_m, config.tile_n, config.threads // 32, config.shared_layout()
    blocks, rows, count, inf = tile_n // 8, 2, tile_n // 2, float32(math.inf)
    tiles, tiles_of, of_query = score_tiles.make(config), score_ranges.of_bias(config), lse_delta.of_query(config)
    chain, scores, has_functions = fragments.chain(config), backward_scores.make(config), user.present(config)
    read, kept_weight = scores.read, scores.kept_weight
    dtype = "float32" if config.split else config.dtype_of("bias")
    store, pack = elements.storer(dtype), cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def read_scores(place, registers, smem, thread, arrays, strides, sizes):
        """Loads what the scores need from global memory, before their products are ready."""
        if read.reads:
            origin = read.origin(place.sequence.b, place.h, int32(place.i * tile_m), arrays, strides)
            scores.load(place.j, origin, registers, arrays, strides, sizes, TRUE)

    @inlined
    def add_scores(place, registers, smem, thread, arrays, strides, sizes, score):
        """sums += dS of a tile whose products are ready."""
        sequence, h, first_key = place.sequence, place.h, scores.first_column(place.j)
        first_query = int32(place.i * tile_m + scores.own_row())
        of_lane = LanePlace(int64(sequence.b), int64(h), first_query, sequence.q_start, first_key)
        for r in range(rows):
            query = int32(first_query + r * 8)
            first, end = row_keys(sequence.q_start + query, sizes.left, sizes.right, sequence.keys)
            if query >= sequence.seqlen_q:
                end = first
            scores.show_seen(r, place.j, RowState(int32(first), int32(end), inf, inf), registers)
        if has_functions:
            scores.apply(of_lane, TRUE, registers, arrays, strides, score)
        if kept_weight.present:
            scores.find_kept(of_lane, registers, arrays, sizes)
        scores.find_distances(of_lane, registers)
        term = chain.row_term(sequence.b, h, arrays, strides)
        for r in range(rows):
            query = int32(first_query + r * 8)
            lse, delta = inf, float32(0)
            if query < sequence.seqlen_q:
                lse, delta = of_query(sequence, h, query, arrays, sizes)
            for n in range(blocks):
                for x in range(2):
                    scores.add_delta(r, n, x, registers, -delta, score)
                    p = scores.weigh(r, n, x, registers, term, lse, registers.shown_bits[r], score, TRUE)
                    if p != 0:
                        registers.sums[n * 4 + r * 2 + x] += registers.acc_dp[n * 4 + r * 2 + x]

    over_tiles = tiles.loop(read_scores, nothing, add_scores)

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
            local.array(rows, float32),  # distance: q_pos - k_pos of each row at the lane's first column
            local.array(read.bias_words, uint32),  # loaded
            local.array(rows, uint32),  # shown_bits
            local.array(kept_weight.words, uint32),  # kept
        )
        for x in range(count):
            registers.sums[x] = float32(0)

        over_tiles(own, registers, smem, thread, arrays, strides, sizes, score)
        target, by, base = tiles_of.target_of(own, split, arrays, strides, sizes)
        first_query, first_key = int64(own.i) * tile_m, int64(own.j) * tile_n
        if config.rows_summed or config.keys_summed:
            at = smem.q + int32(plan.sums)
            store_sums(registers, target, by, base, first_query, first_key, at, thread, sizes)
        else:
            store_tile(registers, target, by, base, first_query, first_key, thread, sizes)

    return flash_attention_mma_dbias
