"""The loop of a consumer of wgmma/backward over the tiles of the other side: query tiles if its block owns keys,
otherwise key tiles. The producer's threads visit the same tiles in the same order.

Both makers return these device functions. i: a tile; member: the index of its query head in the group; limit: the
number of query tiles, or the last key tile; states: where the states of key tiles begin (kernels/score/tile_walk.py).

    start       -> (limit, states, i, member) of the first tile
    following   -> (i, member) of the next tile
    needs_mask  -> (whether mask_mod removes something of tile i, i); if no tile is left, of some other one

early: `following` may take a while, and is called beside the products of tile i. In a loop over query tiles it then
leaves out those in which nothing is seen, so limit is too large and the heads end the loop.
"""

import math

from numba import float32, int32

from ..score import tile_walk
from ..steps import lse_delta
from ..steps.basics import first_row_of, inlined, named
from . import backward_work, block
from .block import BEGIN, FIRST_ROW, STATES, STOP, H, rows_of_lane


def over_queries(config):
    """-> the functions of a block with keys. It visits the query tiles of one head of the group after the other."""
    walk = backward_work.query_walk(config, whole_warp=True)

    @inlined
    def start(base, arrays, strides):
        limit = walk.steps(base)
        i, member = walk.first(base, arrays, strides)
        return limit, int32(0), i, member

    @inlined
    def following(base, i, member, limit, states, arrays, strides):
        return walk.next(base, i, member, arrays, strides)

    @inlined
    def needs_mask(base, i, member, arrays, strides):
        return walk.needs_mask(base, i, member, arrays, strides), i

    return named(start, following, needs_mask, early=walk.present)


def over_keys(config):
    """-> the functions of a block with queries of one head, which visits key tiles in descending order. And load_rows:
    lse and -delta of these queries stay in registers."""
    walk, word = tile_walk.make(config, whole_warp=True), block.state_of(config).read
    queries_of = block.sequence_of_work(config, queries=True)

    @inlined
    def load_rows(base, arrays, strides, sizes, lse_log2, minus_delta):
        """lse_log2 (2,), minus_delta (2,) <- those of the lane's own rows; inf and 0 past the last query."""
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

    return named(load_rows, start, following, needs_mask, early=True)
