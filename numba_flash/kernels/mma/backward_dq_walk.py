"""How a block of backward_dq.py loops over the key tiles that its queries see.

As in backward_walk.py, what every tile needs is stored in shared memory and read again for each tile: the block's
state, and for each row a RowState.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import ld_st, local, memory, special
from ..score import gradient_functions, kept_weights, tile_walk
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.reads import Origin
from ..steps import block_state, lse_delta, numbers
from ..steps import sequence as sequences
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.plain import first_column_of, first_row_of, lane_and_warp, row_keys
from ..steps.sequence import key_row
from .work_tile import QueryWork


class RowState(NamedTuple):
    """The keys [first, end) that a query sees, its lse in the scores' units, +inf if it sees none, and its -delta."""

    first: int
    end: int
    lse: Any
    minus_delta: Any


class KeyTile(NamedTuple):
    """Where K and V of a key tile begin, and how many keys there are from there on."""

    k: int
    v: int
    keys_left: int


class Walk(NamedTuple):
    """Device functions. j: a key tile; q_smem: where shared memory begins."""

    set_up_state: Callable[..., Any]
    work_again: Callable[..., Any]
    row_state: Callable[..., Any]
    seen_columns: Callable[..., Any]
    distances: Callable[..., Any]
    find_kept: Callable[..., Any]
    load_for_scores: Callable[..., Any]
    ask_functions: Callable[..., Any]
    key_tile: Callable[..., Any]
    is_unmasked: Callable[..., Any]
    next_tile: Callable[..., Any]
    start_dp: Callable[..., Any]
    finish_dp: Callable[..., Any]


def make(config):
    tile_m, tile_n, warp_rows, size = config.tile_m, config.tile_n, config.warp_rows, config.item_size
    plan, groups, shift = config.shared_layout(), config.column_groups, config.column_groups.bit_length() - 1
    bases_at, keys_at, head_at, tile_at, walk_at, origin_at = (plan.state + n * block_state.SIZE for n in range(6))
    part = tile_n // groups  # keys of a tile for which a warp computes scores
    strips, blocks, rows = warp_rows // 16, part // 8, warp_rows // 8
    read, states, of_query = score_reads.make(config, strips, part), tile_walk.make(config), lse_delta.of_query(config)
    has_mask, has_score_mod, has_functions = (
        config.has("mask"),
        config.has("score_mod"),
        gradient_functions.present(config),
    )
    apply_functions = gradient_functions.on_fragments(config, strips, part, of_keys=False)
    dropout = kept_weights.on_fragments(config, strips, part)
    real, sequence_again = numbers.of(config.compute_dtype).real, sequences.again(config)
    always_asks = has_score_mod or config.packed and config.has("mask_mod")
    double, state_bytes, inf = config.dtype == "float64", 32 if config.dtype == "float64" else 16, real(math.inf)

    @inlined
    def put_row_state(at, first, end, lse, minus_delta):
        block_state.put_range(at, int32(first), int32(end))
        if double:
            two = local.array(2, real)
            two[0], two[1] = lse, minus_delta
            ld_st.store_v2_f64(at + 16, two, 0)
        else:
            ld_st.store_b32(at + 8, float32(lse).view(np.uint32))
            ld_st.store_b32(at + 12, float32(minus_delta).view(np.uint32))

    @inlined
    def get_row_state(at):
        if double:
            two = local.array(2, real)
            ld_st.load_v2_f64(two, 0, at + 16)
            first, end = block_state.get_range(at)
            return RowState(first, end, two[0], two[1])
        four = local.array(4, uint32)
        ld_st.load_v4(four, 0, at)
        return RowState(int32(four[0]), int32(four[1]), four[2].view(np.float32), four[3].view(np.float32))

    @inlined
    def set_up_state(tile, free, cut, arrays, strides, sizes, q_smem, thread):
        """Stores what every tile needs. All queries see key tiles [free, cut) whole."""
        sequence, h, h_kv, first_query, _ = tile
        tile_pos = sequence.q_start + first_query
        if thread == 0:
            k_base, v_base = key_row(strides.k, sequence, h_kv, 0), key_row(strides.v, sequence, h_kv, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            block_state.put(
                q_smem + int32(bases_at), memory.address(arrays.k, k_base), memory.address(arrays.v, v_base)
            )
            block_state.put(q_smem + int32(keys_at), int64(tile_pos), int64(sequence.keys))
            block_state.put(q_smem + int32(head_at), int64(sequence.b), int64(h))
            block_state.put(q_smem + int32(tile_at), int64(first_query), int64(h_kv))
            block_state.put_range(q_smem + int32(walk_at), free, cut)
            if states.present:
                row = states.row(sequence.b, h, first_query, arrays, strides)
                block_state.put_range(q_smem + int32(walk_at + 8), row, int32(0))
            if read.reads:
                origin = read.origin(sequence.b, h, first_query, arrays, strides)
                block_state.put(q_smem + int32(origin_at), origin.bias, origin.bits)
        for step in range(-(-tile_m // config.threads)):
            row = int32(thread + step * config.threads)
            if row < tile_m:
                first_key, end_key = row_keys(tile_pos + row, sizes.left, sizes.right, sequence.keys)
                lse, delta = inf, real(0)
                if first_query + row < sequence.seqlen_q:
                    lse, delta = of_query(sequence, h, first_query + row, arrays, sizes)
                elif has_functions:  # they are not called for a row that does not exist
                    end_key = first_key
                put_row_state(q_smem + int32(plan.of_rows) + state_bytes * row, first_key, end_key, lse, -delta)

    @inlined
    def work_again(q_smem, arrays, strides, sizes):
        """-> QueryWork, from the state of the block."""
        position, keys = block_state.get(q_smem + int32(keys_at))
        b, h = block_state.get(q_smem + int32(head_at))
        first_query, h_kv = block_state.get(q_smem + int32(tile_at))
        sequence = sequence_again(int32(b), keys, position - first_query, arrays, strides, sizes)
        return QueryWork(sequence, int32(h), int32(h_kv), int32(first_query), int32(0))

    @inlined
    def states_of(q_smem):
        row, _ = block_state.get_range(q_smem + int32(walk_at + 8))
        return row

    @inlined
    def is_unmasked(j, q_smem, arrays, strides):
        """Whether every row sees every key of tile j, and no function is called there. In float32 and float64 no tile
        has code of its own for that."""
        if always_asks or size > 2:
            return False
        free, cut = block_state.get_range(q_smem + int32(walk_at))
        whole = j >= free and j < cut
        if states.present:
            if whole:
                whole = not states.needs_mask(states_of(q_smem), j, arrays, strides)
        return whole

    @inlined
    def next_tile(j, begin, q_smem, arrays, strides):
        """The next tile after j; one before begin if none is left."""
        if states.present:
            return int32(states.next_tile(states_of(q_smem), j, begin, arrays, strides))
        return int32(j - 1)

    @inlined
    def lane_row():
        """The lane's first row of the tile."""
        thread = special.thread_index()
        return (thread >> int32(5 + shift)) * warp_rows + int32(first_row_of(thread & int32(31)))

    @inlined
    def first_key_of(j):
        """The key of the lane's first column of scores of key tile j."""
        thread = special.thread_index()
        column = int32(first_column_of(thread & int32(31))) + ((thread >> int32(5)) & (groups - 1)) * part
        return int32(j * int32(tile_n) + column)

    @inlined
    def row_state(r, q_smem):
        """-> RowState of the lane's row r."""
        return get_row_state(q_smem + int32(plan.of_rows) + state_bytes * (lane_row() + r * 8))

    @inlined
    def seen_columns(j, state):
        """Bits of those of the lane's columns of key tile j that a row sees."""
        first_key = first_key_of(j)
        return columns_within(int32(state.first - first_key), int32(state.end - first_key), 0)

    @inlined
    def distances(j, q_smem, distance):
        """q_pos - k_pos of the lane's rows at its first column of key tile j."""
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        first_key = first_key_of(j)
        for r in range(rows):
            distance[r] = real(tile_pos + (lane_row() + r * 8) - first_key)

    @inlined
    def find_kept(j, kept, q_smem, arrays, sizes):
        """kept <- which of the lane's weights of key tile j count."""
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        dropout.of_queries(kept, first_key_of(j), b, int32(h), lane_row(), tile_pos, arrays, sizes)

    @inlined
    def load_for_scores(j, registers, q_smem, arrays, strides, sizes, masked):
        """Loads what the scores of tile j need from global memory, while they are computed."""
        lane, warp = lane_and_warp()
        bias, bits = block_state.get(q_smem + int32(origin_at))
        first_query, _ = block_state.get(q_smem + int32(tile_at))
        part_j = int32(j * groups + (warp & (groups - 1)))  # index of the warp's part of the keys
        origin, inside = Origin(bias, bits, int32(first_query)), FALSE if masked else TRUE
        loaded, shown_bits, first_row = registers.loaded, registers.shown_bits, (warp >> shift) * warp_rows
        read.load(loaded, shown_bits, part_j, origin, first_row, lane, arrays, strides, sizes, inside)

    @inlined
    def ask_functions(j, registers, q_smem, arrays, strides, score):
        """acc_s, acc_dp <- with score_mod and its derivative; shown_bits <- without what any option hides."""
        asks = states.needs_mask(states_of(q_smem), j, arrays, strides) if states.present else TRUE
        for r in range(rows):
            seen = seen_columns(j, row_state(r, q_smem))
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        first_query, _ = block_state.get(q_smem + int32(tile_at))
        if has_score_mod or asks:
            apply_functions(
                registers.acc_s, registers.acc_dp, registers.shown_bits, b, h, int32(first_query + lane_row()),
                tile_pos - first_query, first_key_of(j), asks, arrays, strides, score,
            )  # fmt: skip

    @inlined
    def key_tile(j, strides, q_smem):
        """-> KeyTile j."""
        first_key = int32(j * int32(tile_n))
        k_base, v_base = block_state.get(q_smem + int32(bases_at))
        _, keys = block_state.get(q_smem + int32(keys_at))
        k, v = k_base + size * (first_key * strides.k[2]), v_base + size * (first_key * strides.v[2])
        return KeyTile(k, v, int32(keys) - first_key)

    @inlined
    def start_dp(acc_dp, q_smem):
        """acc_dp <- -delta of each row, so that the product gives dP - delta. With dropout finish_dp subtracts it."""
        for r in range(rows):
            minus_delta = real(0) if dropout.present else row_state(r, q_smem).minus_delta
            for n in range(blocks):
                for x in range(2):
                    acc_dp[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x] = minus_delta

    @inlined
    def finish_dp(acc_dp, kept, q_smem, score):
        """acc_dp <- dP times how often its weight counts, minus delta."""
        for r in range(rows):
            minus_delta = row_state(r, q_smem).minus_delta
            for n in range(blocks):
                for x in range(2):
                    at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x
                    dp = acc_dp[at]
                    if dropout.present:
                        dp = dp * score.kept_count if (kept[r] >> uint32(2 * n + x)) & uint32(1) != 0 else real(0)
                    acc_dp[at] = dp + minus_delta

    return Walk(
        set_up_state, work_again, row_state, seen_columns, distances, find_kept, load_for_scores, ask_functions,
        key_tile, is_unmasked, next_tile, start_dp, finish_dp,
    )  # fmt: skip
