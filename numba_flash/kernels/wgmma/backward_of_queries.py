"""A block of wgmma/backward that owns queries: its loop over key tiles, and how it writes dQ."""

import math

from numba import float32, int32

from ..recompute import queries as recompute
from ..score import tile_walk
from ..steps import lse_delta, row_writers
from ..steps.basics import first_row_of, inlined, named
from ..steps.sequence import QueryTile, query_row
from . import block
from .block import BEGIN, FIRST_ROW, STATES, STOP, B, H, rows_of_lane


def key_loop(config):
    """-> the same as backward.query_loop, over key tiles. limit: the last tile of the loop."""
    walk, word = tile_walk.make(config, whole_warp=True), block.state_of(config).read

    @inlined
    def start(base, arrays, strides):
        begin = word(base, BEGIN)
        states = word(base, STATES) if walk.present else int32(0)
        return begin, states, int32(word(base, STOP) - 1), int32(0)

    @inlined
    def following(base, i, member, limit, states, arrays, strides):
        return walk.next_tile(states, i, limit, arrays, strides), member

    @inlined
    def needs_mask(base, i, member, arrays, strides):
        if not walk.present:
            return walk.needs_mask(int32(0), i, arrays, strides), i
        i = max(i, word(base, BEGIN))  # if none is left
        return walk.needs_mask(word(base, STATES), i, arrays, strides), i

    return named(start, following, needs_mask, early=True)


def load_rows(config):
    """-> load(base, arrays, strides, sizes, lse_log2, minus_delta), a device function: loads lse and -delta of the
    lane's two rows."""
    word, queries_of = block.state_of(config).read, block.sequence_of_work(config, queries=True)

    @inlined
    def load(base, arrays, strides, sizes, lse_log2, minus_delta):
        first_row, lane = rows_of_lane()
        sequence, h = queries_of(base, arrays, strides, sizes), word(base, H)
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse_log2[r] = float32(math.inf)
            minus_delta[r] = float32(0)
            if query < sequence.seqlen_q:
                row = lse_delta.block_row(sequence, h, query, sizes)
                lse_log2[r] = arrays.lse_delta[row]
                minus_delta[r] = arrays.lse_delta[row + lse_delta.MINUS_DELTA]

    return load


def writer(config):
    """-> write(base, acc_dq, arrays, strides, sizes, score), a device function of a consumer warpgroup."""
    tile_m, head_dim = config.tile_m, config.head_dim
    word, queries_of = block.state_of(config).read, block.sequence_of_work(config, queries=True)
    store = row_writers.of_gradient(config.dtype, 16, -(-head_dim // 16) * 2, head_dim % 8 == 0)
    recompute_queries = recompute.make(config)

    @inlined
    def write(base, acc_dq, arrays, strides, sizes, score):
        """A warp writes its rows of dQ."""
        first_row, lane = rows_of_lane()
        own = QueryTile(word(base, B), word(base, H), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(base, arrays, strides, sizes)
        left = int32(min(sequence.seqlen_q - own.first_query, tile_m) - first_row)
        to, row = query_row(strides.dq, sequence, own.h, own.first_query + first_row), strides.dq[2]
        nonfinite = store(acc_dq, score.scale, lane, arrays.dq, to, row, left, left, int32(head_dim))
        if nonfinite != 0:
            recompute_queries(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    return write
