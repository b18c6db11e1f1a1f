"""A block of backward.py that owns queries of one head. It walks over the key tiles that they see, the last one first.

Its functions are those of backward_of_keys.py, which says what they do. As there, what every tile needs is stored in
shared memory and read again for each tile: the block's state, and for each row a RowState.
"""

import math
from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import ld_st, local, memory, special
from ..score import tile_walk, user
from ..score.gradient_functions import LanePlace
from ..score.reads import Origin
from ..steps import async_tiles, block_state, lse_delta, numbers, sequence as sequences
from ..steps.basics import FALSE, divide, inlined, named, nothing, row_keys, tiles_of
from ..steps.sequence import key_range, key_row, query_row
from . import backward_scores, work_tile
from .backward_scores import RowState
from .work_tile import QueryWork

# The t-th key tile; there is none before `begin`.
Tile = namedtuple("Tile", "t begin")
# Where K and V of a tile begin, and how many keys there are from there on.
Sources = namedtuple("Sources", "k v keys_left")


def make(config):
    tile_m, tile_n, stages, size = config.tile_m, config.tile_n, config.stages, config.item_size
    plan, rows, blocks, double = config.shared_layout(), config.warp_rows // 8, config.part // 8, size == 8
    walk_at, bases_at, keys_at, head_at, tile_at, origin_at = (plan.state + n * block_state.SIZE for n in range(6))
    k_stage, v_stage = (plan.other_dp - plan.other_s) // stages, (plan.p - plan.other_dp) // stages
    state_bytes, real = (plan.state - plan.of_rows) // tile_m, numbers.of(config.compute_dtype).real
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config)
    work_of, states, scores = work_tile.of_queries(config, tile_m), tile_walk.make(config), backward_scores.make(config)
    of_query, sequence_again = lse_delta.of_query(config), sequences.again(config)
    read, has_mask, has_functions, inf = scores.read, config.has("mask"), user.present(config), real(math.inf)

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
    def own_row(r, smem, of_range):
        """-> RowState of the lane's row r."""
        at = smem + int32(plan.of_rows) + state_bytes * (scores.own_row() + r * 8)
        if double:
            two = local.array(2, real)
            ld_st.load_v2_f64(two, 0, at + 16)
            first, end = block_state.get_range(at)
            return RowState(first, end, two[0], two[1])
        four = local.array(4, uint32)
        ld_st.load_v4(four, 0, at)
        return RowState(int32(four[0]), int32(four[1]), four[2].view(np.float32), four[3].view(np.float32))

    @inlined
    def rows_left(work):
        """How many of the block's queries exist."""
        return int32(min(work.sequence.seqlen_q - work.first_query, tile_m))

    @inlined
    def key_tiles(work, arrays, strides, sizes):
        """-> (begin, free, cut, stop): the queries see some of key tiles [begin, stop), and all of [free, cut)."""
        sequence, h, first_query = work.sequence, work.h, work.first_query
        end_query = first_query + rows_left(work)
        begin_, free_, cut_, stop_ = key_range(sequence, first_query, end_query - 1, sizes, tile_n)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the key tiles before the first and after the last in which it leaves a key
            first, end, _, _ = read.ranges(sequence.b, h, 1, first_query, end_query, arrays, strides, sizes)
            begin = max(begin, divide(first, tile_n))
            stop = max(min(stop, tiles_of(end, tile_n)), begin)
        if states.present:
            states_row = states.row(sequence.b, h, first_query, arrays, strides)
            begin, stop = states.trim(states_row, begin, stop, arrays, strides)
        return begin, free, cut, stop

    @inlined
    def set_up(work, smem, thread, arrays, strides, sizes):
        """Stores what every tile needs. -> the first Tile."""
        sequence, h, h_kv, first_query, _ = work
        begin, free, cut, stop = key_tiles(work, arrays, strides, sizes)
        tile_pos = sequence.q_start + first_query
        if thread == 0:
            k_base, v_base = key_row(strides.k, sequence, h_kv, 0), key_row(strides.v, sequence, h_kv, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            k, v = memory.address(arrays.k, k_base), memory.address(arrays.v, v_base)
            block_state.put_range(smem + int32(walk_at), free, cut)
            if states.present:
                row = states.row(sequence.b, h, first_query, arrays, strides)
                block_state.put_range(smem + int32(walk_at + 8), row, int32(0))
            block_state.put(smem + int32(bases_at), k, v)
            block_state.put(smem + int32(keys_at), int64(tile_pos), int64(sequence.keys))
            block_state.put(smem + int32(head_at), int64(sequence.b), int64(h))
            block_state.put(smem + int32(tile_at), int64(first_query), int64(h_kv))
            if read.reads:
                origin = read.origin(sequence.b, h, first_query, arrays, strides)
                block_state.put(smem + int32(origin_at), origin.bias, origin.bits)
        for step in range(-(-tile_m // config.threads)):
            row = int32(thread + step * config.threads)
            if row < tile_m:
                first_key, end_key = row_keys(tile_pos + row, sizes.left, sizes.right, sequence.keys)
                lse, delta = inf, real(0)
                if first_query + row < sequence.seqlen_q:
                    lse, delta = of_query(sequence, h, first_query + row, arrays, sizes)
                elif has_functions:  # they are not called for a row that does not exist
                    end_key = first_key
                put_row_state(smem + int32(plan.of_rows) + state_bytes * row, first_key, end_key, lse, -delta)
        cuda.syncthreads()
        return Tile(int32(stop - 1), begin)

    @inlined
    def work_again(smem, arrays, strides, sizes):
        """-> QueryWork, from the state of the block."""
        position, keys = block_state.get(smem + int32(keys_at))
        b, h = block_state.get(smem + int32(head_at))
        first_query, h_kv = block_state.get(smem + int32(tile_at))
        sequence = sequence_again(int32(b), keys, position - first_query, arrays, strides, sizes)
        return QueryWork(sequence, int32(h), int32(h_kv), int32(first_query), int32(0))

    # The walk.

    @inlined
    def exists(tile):
        return tile.t >= tile.begin

    @inlined
    def states_of(smem):
        """Where the states of the head's tiles begin (kernels/score/tile_walk.py)."""
        if not states.present:
            return int32(0)
        row, _ = block_state.get_range(smem + int32(walk_at + 8))
        return row

    @inlined
    def following(tile, smem, arrays, strides):
        return Tile(int32(states.next_tile(states_of(smem), tile.t, tile.begin, arrays, strides)), tile.begin)

    @inlined
    def needs_mask(tile, smem, arrays, strides):
        return states.needs_mask(states_of(smem), tile.t, arrays, strides)

    # Loads.

    @inlined
    def load_own(work, smem, thread, arrays, strides):
        """Start the copies of the block's Q and dO."""
        sequence, h, first_query, left = work.sequence, work.h, work.first_query, rows_left(work)
        q_global = memory.address(arrays.q, query_row(strides.q, sequence, h, first_query))
        do_global = memory.address(arrays.do, query_row(strides.do, sequence, h, first_query))
        load_q(smem, q_global, size * strides.q[2], 0, left, config.head_dim, thread)
        load_do(smem + int32(plan.own_dp), do_global, size * strides.do[2], 0, left, config.head_dim_v, thread)

    @inlined
    def sources(tile, of_s, of_dp, smem, strides, sizes):
        first_key = int32(tile.t * int32(tile_n))
        k_base, v_base = block_state.get(smem + int32(bases_at))
        _, keys = block_state.get(smem + int32(keys_at))
        k, v = k_base + size * (first_key * strides.k[2]), v_base + size * (first_key * strides.v[2])
        return Sources(k, v, int32(keys) - first_key)

    @inlined
    def load_s(tile, source, stage, smem, strides, sizes):
        """Start the copies of K of a tile to stage `stage`."""
        to, left = smem + int32(plan.other_s) + stage * k_stage, source.keys_left
        load_k(to, source.k, size * strides.k[2], 0, left, config.head_dim, special.thread_index())

    @inlined
    def load_dp(tile, source, stage, smem, arrays, strides, sizes):
        """Start the copies of V of a tile to stage `stage`."""
        to, left = smem + int32(plan.other_dp) + stage * v_stage, source.keys_left
        load_v(to, source.v, size * strides.v[2], 0, left, config.head_dim_v, special.thread_index())

    # Scores.

    @inlined
    def columns_at(stage, smem):
        return int32(0)

    @inlined
    def lse(values, n, row, at):
        """values <- lse of the lane's row, for two blocks of 8 columns."""
        for x in range(4):
            values[x] = row.lse

    @inlined
    def add_deltas(stage, registers, smem, score):
        """Adds -delta of the rows to acc_dp (backward_scores.py)."""
        for r in range(rows):
            minus_delta = own_row(r, smem, FALSE).minus_delta
            for n in range(blocks):
                for x in range(2):
                    scores.add_delta(r, n, x, registers, minus_delta, score)

    @inlined
    def origin_of(tile, smem, strides):
        bias, bits = block_state.get(smem + int32(origin_at))
        first_query, _ = block_state.get(smem + int32(tile_at))
        return Origin(bias, bits, int32(first_query))

    @inlined
    def lane_place(tile, smem):
        b, h = block_state.get(smem + int32(head_at))
        tile_pos, _ = block_state.get(smem + int32(keys_at))
        tile_query, _ = block_state.get(smem + int32(tile_at))
        first_query, q_start = int32(tile_query + scores.own_row()), tile_pos - tile_query
        return LanePlace(b, h, first_query, q_start, scores.first_column(tile.t))

    return named(
        rows_left, set_up, work_again, exists, following, needs_mask, load_own, sources, load_s, load_dp,
        own_row, columns_at, lse, add_deltas, origin_of, lane_place,
        work_of=work_of, read_bias=nothing,
    )  # fmt: skip
