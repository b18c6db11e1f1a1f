"""How a block of backward_dq.py loops over the key tiles that its queries see.

As in backward_walk.py, what every tile needs is stored in shared memory and read again for each tile: the block's
state, and for each row the keys that it sees, its lse and its -delta.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import ld_st, memory, special
from ..score import gradient_functions, kept_weights, tile_walk
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.reads import Origin
from ..steps import block_state, lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.plain import first_column_of, first_row_of, row_keys
from ..steps.sequence import Sequence, key_row
from .work_tile import QueryWork


class Walk(NamedTuple):
    """Device functions. j: a key tile; q_smem: where shared memory begins."""

    set_up_state: Callable[..., Any]
    work_again: Callable[..., Any]
    of_row: Callable[..., Any]
    first_key_of: Callable[..., Any]
    distances: Callable[..., Any]
    find_kept: Callable[..., Any]
    load_for_scores: Callable[..., Any]
    ask_functions: Callable[..., Any]
    places_of: Callable[..., Any]
    is_unmasked: Callable[..., Any]
    behind: Callable[..., Any]
    states_ends: Callable[..., Any]
    start_dp: Callable[..., Any]
    finish_dp: Callable[..., Any]


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    plan = config.shared_layout()
    bases_at, keys_at, head_at, tile_at, walk_at, origin_at = (plan.state + n * block_state.SIZE for n in range(6))
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_n // groups  # keys of a tile for which a warp computes scores
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    read = score_reads.make(config, strips, part)
    has_mask, has_functions = config.has("mask"), gradient_functions.present(config)
    has_score_mod, of_states = config.has("score_mod"), tile_walk.make(config)
    cut_ends = of_states.trim
    apply_functions = gradient_functions.on_fragments(config, strips, part, of_keys=False)
    drops, _, kept_of, *_ = kept_weights.on_fragments(config, strips, part)
    inf = float32(math.inf)

    @inlined
    def first_key_of(lane, warp):
        """The lane's first column of scores, counted from the beginning of the key tile."""
        return int32(first_column_of(lane)) + (warp & (groups - 1)) * part

    @inlined
    def set_up_state(tile, walk, arrays, strides, sizes, q_smem, thread):
        """Stores what every tile needs."""
        sequence, h, h_kv, first_query, _ = tile
        b, keys, tile_pos = sequence.b, sequence.keys, sequence.q_start + first_query
        if thread == 0:
            k_base, v_base = key_row(strides.k, sequence, h_kv, 0), key_row(strides.v, sequence, h_kv, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            block_state.put(
                q_smem + int32(bases_at), memory.address(arrays.k, k_base), memory.address(arrays.v, v_base)
            )
            block_state.put(q_smem + int32(keys_at), int64(tile_pos), int64(keys))
            block_state.put(q_smem + int32(head_at), int64(b), int64(h))
            block_state.put(q_smem + int32(tile_at), int64(first_query), int64(h_kv))
            block_state.put_range(q_smem + int32(walk_at), walk[0], walk[1])
            if of_states.present:
                states = of_states.row(b, h, first_query, arrays, strides)
                block_state.put_range(q_smem + int32(walk_at + 8), states, int32(0))
            if read.reads:
                origin = read.origin(b, h, first_query, arrays, strides)
                block_state.put(q_smem + int32(origin_at), origin.bias, origin.bits)
        head_lse_delta = lse_delta.head_blocks(sequence, h, sizes)
        for step in range(-(-tile_m // threads)):
            row = int32(thread + step * threads)
            if row < tile_m:
                first_key, end_key = row_keys(tile_pos + row, sizes.left, sizes.right, keys)
                lse_log2, minus_delta = inf, float32(0)
                if first_query + row < sequence.seqlen_q:
                    at = head_lse_delta + lse_delta.place(first_query + row)
                    lse_log2, minus_delta = arrays.lse_delta[at], arrays.lse_delta[at + lse_delta.MINUS_DELTA]
                elif has_functions:  # they are not called for a row that does not exist
                    end_key = first_key
                of_row = q_smem + int32(plan.of_rows) + 16 * row
                block_state.put_range(of_row, int32(first_key), int32(end_key))
                ld_st.store_b32(of_row + 8, float32(lse_log2).view(np.uint32))
                ld_st.store_b32(of_row + 12, float32(minus_delta).view(np.uint32))

    @inlined
    def work_again(q_smem, sizes):
        """-> QueryWork, from the state of the block."""
        position, keys = block_state.get(q_smem + int32(keys_at))
        b, h = block_state.get(q_smem + int32(head_at))
        first_query, h_kv = block_state.get(q_smem + int32(tile_at))
        sequence = Sequence(int32(b), sizes.seqlen_q, keys, position - first_query)
        return QueryWork(sequence, int32(h), int32(h_kv), int32(first_query), int32(0))

    @inlined
    def states_of(q_smem):
        states, _ = block_state.get_range(q_smem + int32(walk_at + 8))
        return states

    @inlined
    def is_unmasked(j, q_smem, arrays, strides):
        """Whether every row sees every key of tile j, and no function is called there."""
        if has_score_mod:
            return False
        free, cut = block_state.get_range(q_smem + int32(walk_at))
        whole = j >= free and j < cut
        if of_states.present:
            if whole:
                whole = not of_states.needs_mask(states_of(q_smem), j, arrays, strides)
        return whole

    @inlined
    def behind(j, begin, q_smem, arrays, strides):
        """The next tile after j; one before begin if none is left."""
        if of_states.present:
            return int32(of_states.next_tile(states_of(q_smem), j, begin, arrays, strides))
        return int32(j - 1)

    @inlined
    def states_ends(tile, begin, stop, arrays, strides):
        """[begin, stop) without the tiles at both ends in which a mask_mod leaves nothing."""
        states = of_states.row(tile.sequence.b, tile.h, tile.first_query, arrays, strides)
        return cut_ends(states, begin, stop, arrays, strides)

    @inlined
    def of_row(r, thread, q_smem):
        """The shared address of the data of the lane's row r."""
        lane, warp = thread & int32(31), thread >> int32(5)
        return q_smem + int32(plan.of_rows) + 16 * ((warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8)

    @inlined
    def distances(j, thread, q_smem, distance):
        """q_pos - k_pos of the lane's rows at its first column of key tile j."""
        lane, warp = thread & int32(31), thread >> int32(5)
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        for r in range(rows):
            row = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
            distance[r] = float32(tile_pos + row - int64(j) * tile_n - first_key_of(lane, warp))

    @inlined
    def find_kept(first_column, kept, q_smem, thread, arrays, sizes):
        """kept <- which of the lane's weights count. first_column: the lane's first key of the tile."""
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        lane_row = (thread >> int32(5 + shift)) * warp_rows + int32(first_row_of(thread & int32(31)))
        kept_of(kept, first_column, b, int32(h), lane_row, tile_pos, arrays, sizes)

    @inlined
    def load_for_scores(j, registers, q_smem, arrays, strides, sizes, masked):
        """Loads what the scores of tile j need from global memory, while they are computed."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        bias, bits = block_state.get(q_smem + int32(origin_at))
        first_query, _ = block_state.get(q_smem + int32(tile_at))
        part_j = int32(j * groups + (warp & (groups - 1)))  # index of the warp's part of the keys
        origin, inside = Origin(bias, bits, int32(first_query)), FALSE if masked else TRUE
        loaded, shown_bits, first_row = registers.loaded, registers.shown_bits, (warp >> shift) * warp_rows
        read.load(loaded, shown_bits, part_j, origin, first_row, lane, arrays, strides, sizes, inside)

    @inlined
    def ask_functions(j, registers, q_smem, arrays, strides, score):
        """acc_s, acc_dp <- with score_mod and its derivative; shown_bits <- without what any option hides."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        asks = of_states.needs_mask(states_of(q_smem), j, arrays, strides) if of_states.present else FALSE
        key = int32(j * int32(tile_n) + first_key_of(lane, warp))
        for r in range(rows):
            first, end = block_state.get_range(of_row(r, thread, q_smem))
            seen = columns_within(int32(first - key), int32(end - key), 0)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        tile_query, _ = block_state.get(q_smem + int32(tile_at))
        query = int32(tile_query + (warp >> shift) * warp_rows + int32(first_row_of(lane)))
        q_start = tile_pos - tile_query
        if has_score_mod or asks:
            apply_functions(
                registers.acc_s, registers.acc_dp, registers.shown_bits, b, h, query, q_start, key, asks, arrays,
                strides, score,
            )  # fmt: skip

    @inlined
    def places_of(j, strides, q_smem):
        """-> (the address of K of key tile j, that of V, the number of keys from there on)."""
        first_key = int32(j * int32(tile_n))
        k_base, v_base = block_state.get(q_smem + int32(bases_at))
        _, keys = block_state.get(q_smem + int32(keys_at))
        return k_base + 2 * (first_key * strides.k[2]), v_base + 2 * (first_key * strides.v[2]), int32(keys) - first_key

    @inlined
    def start_dp(acc_dp, q_smem, thread, score):
        """acc_dp <- -delta of each row, so that the product gives dP - delta. Where weights drop, finish_dp scales it
        later."""
        for r in range(rows):
            minus_delta = uint32(ld_st.load_b32(of_row(r, thread, q_smem) + 12)).view(np.float32)
            if drops:
                minus_delta /= score.kept_count
            for n in range(blocks):
                for x in range(2):
                    acc_dp[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x] = minus_delta

    @inlined
    def finish_dp(registers, q_smem, thread, score):
        """acc_dp <- dP times how often its weight counts, minus delta."""
        for r in range(rows):
            minus_delta = uint32(ld_st.load_b32(of_row(r, thread, q_smem) + 12)).view(np.float32)
            for n in range(blocks):
                for x in range(2):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    counts = (registers.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0
                    registers.acc_dp[at] = registers.acc_dp[at] * score.kept_count if counts else minus_delta

    state = (set_up_state, work_again)
    of_tile = (of_row, first_key_of, distances, find_kept, load_for_scores, ask_functions, places_of, is_unmasked)
    return Walk(*state, *of_tile, behind, states_ends, start_dp, finish_dp)
