"""A block of backward.py that owns keys of one KV head. It walks over the query tiles that see them, for each head of
the group.

What every tile needs is stored in shared memory and read again for each tile: in registers it would be kept through the
loop, and take those that S needs. smem: where shared memory begins. backward_of_queries.py has functions of the same
names.
"""

from collections import namedtuple

from numba import cuda, int32, int64

from ...arrays.dtypes import ITEM_SIZE
from ...ptx import local, memory, special
from ..score import tile_walk
from ..score.gradient_functions import LanePlace
from ..score.reads import Origin
from ..steps import async_tiles, block_state, numbers, sequence as sequences
from ..steps.basics import divide, inlined, key_queries, named, tiles_of
from ..steps.sequence import key_row, query_range, query_row
from . import backward_preprocess, backward_scores, query_columns, work_tile
from .backward_scores import RowState
from .work_tile import KeyWork

# The t-th query tile of a head. Heads are counted backwards: if none is left, there is no tile.
Tile = namedtuple("Tile", "t heads_left")
# Where Q and dO of a tile begin, and the numbers of its head (query_columns.py).
Sources = namedtuple("Sources", "q do head")


def make(config):
    tile_m, tile_n, stages, size = config.tile_m, config.tile_n, config.stages, config.item_size
    plan, rows, blocks = config.shared_layout(), config.warp_rows // 8, config.part // 8
    walk_at, bases_at, heads_at, offset_at, tile_at, reads_at = (plan.state + n * block_state.SIZE for n in range(6))
    q_stage, do_stage = (plan.other_dp - plan.other_s) // stages, (plan.p - plan.other_dp) // stages
    rows_stage, real = (plan.of_rows - plan.rows) // stages, numbers.of(config.compute_dtype).real
    load_q, load_do, load_k, load_v = async_tiles.of_backward(config)
    work_of, columns, scores = work_tile.of_keys(config), query_columns.make(config), backward_scores.make(config)
    states, read = tile_walk.make(config), scores.read
    has_mask, sequence_again, boxes = config.has("mask"), sequences.again(config), config.bias_boxes
    bias_item = ITEM_SIZE[config.dtype_of("bias") or "float32"]
    bias_tile = query_columns.bias(config) if boxes else None
    own_rows = backward_preprocess.in_backward(config) if config.only_tile else None

    @inlined
    def rows_left(work):
        """How many of the block's keys count; it may be below 0."""
        return int32(min(work.sequence.keys - work.first_key, tile_n))

    @inlined
    def query_tiles(work, arrays, strides, sizes):
        """-> (begin, free, cut, stop): query tiles [begin, stop) see some of the keys, and [free, cut) all of them."""
        sequence, h_kv, first_key = work
        keys_left = rows_left(work)
        begin_, free_, cut_, stop_ = query_range(sequence, first_key, first_key + keys_left - 1, sizes, tile_m)
        begin, free, cut, stop = int32(begin_), int32(free_), int32(cut_), int32(stop_)
        if has_mask:  # drop the tiles before the first and after the last query to which it leaves a key
            group, end_key = divide(sizes.heads, sizes.heads_kv), first_key + max(keys_left, int32(1))
            first, end, _, _ = read.ranges(sequence.b, h_kv * group, group, first_key, end_key, arrays, strides, sizes)
            begin, stop = max(begin, divide(first, tile_m)), min(stop, tiles_of(end, tile_m))
        if config.with_dq:  # a query that sees no key has a dQ, too
            begin, stop = int32(0), tiles_of(sequence.seqlen_q, tile_m)
            if keys_left < tile_n:  # what does not exist is hidden: its K is 0, but its dS might be Inf
                free, cut = int32(0), int32(0)
        elif keys_left <= 0:
            stop = begin
        return begin, free, cut, stop

    @inlined
    def set_up(work, smem, thread, arrays, strides, sizes):
        """Stores what every tile needs. -> the first Tile."""
        sequence, h_kv, first_key = work
        group = divide(sizes.heads, sizes.heads_kv)
        begin, free, cut, stop = query_tiles(work, arrays, strides, sizes)
        end_head = (h_kv + 1) * group
        if thread == 0:
            q_end, do_end = query_row(strides.q, sequence, end_head, 0), query_row(strides.do, sequence, end_head, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            q, do = memory.address(arrays.q, q_end), memory.address(arrays.do, do_end)
            block_state.put_range(smem + int32(walk_at), free, cut)
            block_state.put_range(smem + int32(walk_at + 8), begin, stop)
            block_state.put(smem + int32(bases_at), q, do)
            heads_end = columns.head_at(sequence, end_head, arrays, sizes)
            block_state.put(smem + int32(heads_at), heads_end, int64(end_head))
            block_state.put(smem + int32(offset_at), sequence.q_start - first_key, sequence.keys)
            b_and_queries = int64(sequence.seqlen_q) << 32 | sequence.b
            block_state.put(smem + int32(tile_at), b_and_queries, int64(first_key) << 32 | h_kv)
            if read.reads or boxes:
                origin = read.origin(sequence.b, end_head, first_key, arrays, strides)
                block_state.put(smem + int32(reads_at), origin.bias, origin.bits)
        if thread < tile_n:  # the range of queries that see a key
            key = first_key + thread
            first_query, end_query = key_queries(key, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
            end_query = first_query if key >= sequence.keys else end_query
            block_state.put_range(smem + int32(plan.of_rows) + 8 * thread, int32(first_query), int32(end_query))
        cuda.syncthreads()
        tile = Tile(begin, group if begin < stop else int32(0))
        if states.present:
            if begin < stop:
                tile = tile_from(begin, group, smem, arrays, strides)
        return tile

    @inlined
    def seqlen_q(smem, sizes):
        """The number of queries of the block's sequence."""
        if config.packed:
            b_and_queries, _ = block_state.get(smem + int32(tile_at))
            return b_and_queries >> 32
        return sizes.seqlen_q

    @inlined
    def work_again(smem, arrays, strides, sizes):
        """-> KeyWork, from the state of the block."""
        b, tile = block_state.get(smem + int32(tile_at))  # b in the lower half
        first_key, h_kv = int32(tile >> 32), int32(tile)
        from_first_key, keys = block_state.get(smem + int32(offset_at))
        sequence = sequence_again(int32(b), keys, from_first_key + first_key, arrays, strides, sizes)
        return KeyWork(sequence, h_kv, first_key)

    @inlined
    def head_of(heads_left, smem):
        """-> (batch entry, query head)."""
        b, _ = block_state.get(smem + int32(tile_at))  # in the lower half
        _, end_head = block_state.get(smem + int32(heads_at))
        return int64(int32(b)), end_head - heads_left

    # The walk.

    @inlined
    def exists(tile):
        return tile.heads_left > 0

    @inlined
    def tile_from(t, heads_left, smem, arrays, strides):
        """-> the first Tile from tile t of a head on in which a mask_mod leaves something."""
        begin, stop = block_state.get_range(smem + int32(walk_at + 8))
        found = states.first(states_of(heads_left, smem, arrays, strides), t, stop, arrays, strides)
        while found >= stop and heads_left > 0:
            heads_left = int32(heads_left - 1)
            if heads_left > 0:
                found = states.first(states_of(heads_left, smem, arrays, strides), begin, stop, arrays, strides)
        return Tile(found, heads_left)

    @inlined
    def following(tile, smem, arrays, strides):
        """-> the next Tile: after the last one, the first one of the next head."""
        if states.present:
            return tile_from(int32(tile.t + 1), tile.heads_left, smem, arrays, strides)
        begin, stop = block_state.get_range(smem + int32(walk_at + 8))
        last = int32(tile.t + 1) == stop
        return Tile(begin if last else int32(tile.t + 1), int32(tile.heads_left - 1) if last else tile.heads_left)

    @inlined
    def states_of(heads_left, smem, arrays, strides):
        """Where the states of the head's tiles begin (kernels/score/tile_walk.py)."""
        if not states.present:
            return int32(0)
        _, tile = block_state.get(smem + int32(tile_at))
        b, h = head_of(heads_left, smem)
        return states.row(b, int32(h), int32(tile >> 32), arrays, strides)

    @inlined
    def needs_mask(tile, smem, arrays, strides):
        """Whether a mask_mod decides in a tile."""
        return states.needs_mask(states_of(tile.heads_left, smem, arrays, strides), tile.t, arrays, strides)

    # Loads.

    @inlined
    def load_own(work, smem, thread, arrays, strides):
        """Start the copies of the block's K, and of its V if dP is computed."""
        sequence, h_kv, first_key = work
        keys_left = rows_left(work)
        k_global = memory.address(arrays.k, key_row(strides.k, sequence, h_kv, first_key))
        load_k(smem, k_global, size * strides.k[2], 0, keys_left, config.head_dim, thread)
        if config.of_dk:
            v_global = memory.address(arrays.v, key_row(strides.v, sequence, h_kv, first_key))
            load_v(smem + int32(plan.own_dp), v_global, size * strides.v[2], 0, keys_left, config.head_dim_v, thread)

    @inlined
    def origin_of(tile, smem, strides):
        """-> Origin of what the scores of a tile need from global memory (kernels/score/reads.py)."""
        bias, bits = block_state.get(smem + int32(reads_at))
        _, place = block_state.get(smem + int32(tile_at))
        bias = bias - tile.heads_left * (bias_item * strides.bias[1])
        bits = bits - tile.heads_left * (4 * strides.mask_bits_of_keys[1])
        return Origin(bias, bits, int32(place >> 32))

    @inlined
    def sources(tile, of_s, of_dp, smem, strides, sizes):
        """-> Sources of a tile. of_s, of_dp, constants: whether Q's is asked for, and dO's."""
        q_end, do_end = block_state.get(smem + int32(bases_at))
        row, q, do, head = int32(tile.t * int32(tile_m)), int64(0), int64(0), int64(0)
        if of_s:
            q = q_end + size * (row * strides.q[2] - tile.heads_left * strides.q[1])
        if of_dp:
            do = do_end + size * (row * strides.do[2] - tile.heads_left * strides.do[1])
            heads_end, _ = block_state.get(smem + int32(heads_at))
            head = heads_end - tile.heads_left * columns.head_step(sizes)
        return Sources(q, do, head)

    @inlined
    def load_s(tile, source, stage, smem, strides, sizes):
        """Start the copies of Q of a tile to stage `stage`, and of its bias."""
        to, queries = smem + int32(plan.other_s) + stage * q_stage, seqlen_q(smem, sizes)
        left = int32(int32(queries) - tile.t * int32(tile_m))
        load_q(to, source.q, size * strides.q[2], 0, left, config.head_dim, special.thread_index())
        if boxes:
            origin, by_row = origin_of(tile, smem, strides), bias_item * strides.bias[2]
            bias = origin.bias + tile.t * int32(tile_m) * by_row + bias_item * origin.first_row
            keys_left = int32(sizes.seqlen_k - origin.first_row)
            bias_tile.load(smem + int32(plan.bias), bias, by_row, 0, left, keys_left, special.thread_index())

    @inlined
    def load_dp(tile, source, stage, smem, arrays, strides, sizes):
        """Start the copies of dO, lse and delta of a tile to stage `stage`."""
        queries, to = seqlen_q(smem, sizes), smem + int32(plan.other_dp) + stage * do_stage
        left = int32(int32(queries) - tile.t * int32(tile_m))
        load_do(to, source.do, size * strides.do[2], 0, left, config.head_dim_v, special.thread_index())
        of_rows = smem + int32(plan.rows) + stage * rows_stage
        if config.only_tile:
            work = work_again(smem, arrays, strides, sizes)
            own_rows(of_rows, work.sequence, work.h_kv, arrays, strides, sizes)
        else:
            columns.start(tile.t, source.head, of_rows, queries, arrays)

    # Scores.

    @inlined
    def own_row(r, smem, of_range):
        """-> RowState of the lane's key r. of_range, a constant: whether its first and end are asked for."""
        first, end = int32(0), int32(0)
        if of_range:
            first, end = block_state.get_range(smem + int32(plan.of_rows) + 8 * (scores.own_row() + r * 8))
        return RowState(first, end, real(0), real(0))

    @inlined
    def columns_at(stage, smem):
        """Where lse of the lane's columns begins; `lse` takes it."""
        return columns.lane_at(smem + int32(plan.rows) + stage * rows_stage)

    @inlined
    def lse(values, n, row, at):
        """values[n % 2 * 2 :] <- lse of the lane's two columns of block n of 8, in the order of n."""
        columns.lse(values, n, at)

    @inlined
    def add_deltas(stage, registers, smem, score):
        """Adds -delta of the columns to acc_dp (backward_scores.py)."""
        minus_delta, at = local.array(4, real), columns_at(stage, smem)
        for n in range(blocks):
            columns.minus_delta(minus_delta, n, at)
            for r in range(rows):
                for x in range(2):
                    scores.add_delta(r, n, x, registers, minus_delta[(n % 2) * 2 + x], score)

    @inlined
    def read_bias(loaded, r, smem):
        """loaded <- the bias of the lane's row r, if it came with the queries."""
        if boxes:
            bias_tile.read(loaded, r, smem + int32(plan.bias))

    @inlined
    def lane_place(tile, smem):
        """-> LanePlace of the lane's scores of a tile."""
        _, place = block_state.get(smem + int32(tile_at))
        from_first_key, _ = block_state.get(smem + int32(offset_at))
        first_key, (b, h) = int32(place >> 32), head_of(tile.heads_left, smem)
        first_query, q_start = scores.first_column(tile.t), from_first_key + first_key
        return LanePlace(b, h, first_query, q_start, int32(first_key + scores.own_row()))

    return named(
        rows_left, set_up, work_again, exists, following, needs_mask, load_own, sources, load_s, load_dp,
        own_row, columns_at, lse, add_deltas, origin_of, read_bias, lane_place,
        work_of=work_of,
    )  # fmt: skip
