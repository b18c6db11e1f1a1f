"""How a block of backward_dq.py loops over the key tiles that its queries see.

As in backward_walk.py, what every tile needs is stored in shared memory and read again for each tile: the block's
state, and for each row a RowState. j: a key tile; q_smem: where shared memory begins.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import ld_st, local, memory
from ..score import tile_walk, user
from ..score.gradient_functions import LanePlace
from ..score.reads import Origin
from ..steps import block_state, lse_delta, numbers
from ..steps import sequence as sequences
from ..steps.inlined import TRUE, inlined
from ..steps.named import named
from ..steps.plain import row_keys
from ..steps.sequence import key_row
from . import backward_scores
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


def make(config):
    tile_m, tile_n, size, rows = config.tile_m, config.tile_n, config.item_size, config.warp_rows // 8
    plan, scores, states = config.shared_layout(), backward_scores.make(config), tile_walk.make(config)
    bases_at, keys_at, head_at, tile_at, walk_at, origin_at = (plan.state + n * block_state.SIZE for n in range(6))
    blocks, of_query, sequence_again = config.part // 8, lse_delta.of_query(config), sequences.again(config)
    has_mask, has_functions, double = config.has("mask"), user.present(config), config.dtype == "float64"
    real, state_bytes, dropout = numbers.of(config.compute_dtype).real, 32 if double else 16, scores.kept_weight
    inf = real(math.inf)

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
            k, v = memory.address(arrays.k, k_base), memory.address(arrays.v, v_base)
            block_state.put(q_smem + int32(bases_at), k, v)
            block_state.put(q_smem + int32(keys_at), int64(tile_pos), int64(sequence.keys))
            block_state.put(q_smem + int32(head_at), int64(sequence.b), int64(h))
            block_state.put(q_smem + int32(tile_at), int64(first_query), int64(h_kv))
            block_state.put_range(q_smem + int32(walk_at), free, cut)
            if states.present:
                row = states.row(sequence.b, h, first_query, arrays, strides)
                block_state.put_range(q_smem + int32(walk_at + 8), row, int32(0))
            if scores.read.reads:
                origin = scores.read.origin(sequence.b, h, first_query, arrays, strides)
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
        """Whether every row sees every key of tile j, and the tile has code of its own for that."""
        if scores.always_masked:
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
    def row_state(r, q_smem):
        """-> RowState of the lane's row r."""
        return get_row_state(q_smem + int32(plan.of_rows) + state_bytes * (scores.own_row() + r * 8))

    @inlined
    def distances(j, q_smem, distance):
        """q_pos - k_pos of the lane's rows at its first column of key tile j."""
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        first_key = scores.first_column(j)
        for r in range(rows):
            distance[r] = real(tile_pos + (scores.own_row() + r * 8) - first_key)

    @inlined
    def find_kept(j, kept, q_smem, arrays, sizes):
        """kept <- which of the lane's weights of key tile j count."""
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        first_key = scores.first_column(j)
        dropout.of_queries(kept, first_key, b, int32(h), scores.own_row(), tile_pos, arrays, sizes)

    @inlined
    def load_for_scores(j, registers, q_smem, arrays, strides, sizes, masked):
        """Loads what the scores of tile j need from global memory, while they are computed."""
        bias, bits = block_state.get(q_smem + int32(origin_at))
        first_query, _ = block_state.get(q_smem + int32(tile_at))
        scores.load(j, Origin(bias, bits, int32(first_query)), registers, arrays, strides, sizes, masked)

    @inlined
    def ask_functions(j, registers, q_smem, arrays, strides, score):
        """acc_s, acc_dp <- with score_mod and its derivative; shown_bits <- without what any option hides."""
        asks = states.needs_mask(states_of(q_smem), j, arrays, strides) if states.present else TRUE
        for r in range(rows):
            state = row_state(r, q_smem)
            seen = scores.within(scores.first_column(j), state.first, state.end)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        b, h = block_state.get(q_smem + int32(head_at))
        tile_pos, _ = block_state.get(q_smem + int32(keys_at))
        tile_query, _ = block_state.get(q_smem + int32(tile_at))
        first_query, q_start = int32(tile_query + scores.own_row()), tile_pos - tile_query
        of_lane = LanePlace(b, h, first_query, q_start, scores.first_column(j))
        scores.apply(of_lane, asks, registers, arrays, strides, score)

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

    return named(
        set_up_state, work_again, row_state, distances, find_kept, load_for_scores, ask_functions, key_tile,
        is_unmasked, next_tile, start_dp, finish_dp,
    )  # fmt: skip
