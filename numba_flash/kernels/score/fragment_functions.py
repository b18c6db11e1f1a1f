"""Applies the caller's own functions to a tile of scores in a warp's accumulators, in the layout of fragments.py.

It goes element by element, each with its position. A function is called only for scores that count, because elsewhere
it might read past the end of an array. So every tile has its mask bits, and mask_mod clears some of them.
"""

import functools
from typing import Any, NamedTuple

from numba import int32, int64, uint32

from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, named
from ..steps.repeated import repeated
from . import At, user


class LaneScores(NamedTuple):
    """The place of a lane's scores."""

    b: Any
    h: Any  # the head of the query tile's first row
    first_row: Any  # the lane's first row in the query tile
    last_row: Any  # the last row of the query tile that exists
    first_query: Any  # the query tile's first query
    first_key: Any  # the lane's first key
    tile_pos: Any  # position of the query tile's first query
    ahead: Any  # position of the lane's first row less first_key


@functools.cache
def make(config, strips=1):
    """A tile of config.tile_n columns, of which a warp has `strips` strips of 16 rows. needs_mask: whether mask_mod
    removes something of it (tile_walk.py). every_tile: whether there is work also where mask_mod decides nothing."""
    has_score_mod, has_mask_mod = config.has("score_mod"), user.calls_mask_mod(config)
    shared, blocks = config.group_size > 1, config.tile_n // 8  # shared: a tile has the queries of several heads
    words, changed = -(-blocks // 16), user.both(config, False)

    @inlined
    def block(n, acc_s, mask_bits, place, inside, needs_mask, arrays, strides, score):
        """Block n of 8 columns. inside: all scores count; no branch surrounds a score, so they are computed side by
        side."""
        # The inner loop goes over rows: with columns inside, the compiler would keep the positions of all columns.
        for i in range(2):
            k_pos, bit = int32(place.first_key + n * 8 + i), uint32(1) << uint32(2 * (n & 15) + i)
            for r in range(2 * strips):
                word, index = r * words + (n >> 4), ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                if inside or mask_bits[word] & bit != 0:
                    row = int32(place.first_row + r * 8)
                    if shared:  # inside, a row may not exist
                        row = min(row, place.last_row)
                    query = int32(uint32(row) // uint32(config.group_size))
                    q_pos, head = int64(place.tile_pos + query), int32(place.h + row - query * config.group_size)
                    ahead = q_pos - k_pos if shared else place.ahead + (r * 8 - n * 8 - i)
                    at = At(place.b, head, int32(place.first_query + query), k_pos, q_pos, ahead)
                    acc_s[index], _, seen = changed(acc_s[index], at, needs_mask, arrays, strides, score)
                    if has_mask_mod:
                        if not seen:
                            mask_bits[word] &= ~bit

    # Without functions there is nothing to compile.
    present = user.present(config)
    every_block = repeated(block, blocks if present else 0)

    @inlined
    def place_of(j, b, h, first_row, lane, first_query, tile_pos, queries_left):
        """-> LaneScores of key tile j. first_row: the warp's, in the query tile, which begins with first_query at
        position tile_pos and has queries_left queries; h: the head of its first row."""
        first, first_key = int32(first_row + first_row_of(lane)), int32(j * config.tile_n + first_column_of(lane))
        last, ahead = int32(queries_left * config.group_size - 1), int64(tile_pos + first - first_key)
        return LaneScores(b, h, first, last, first_query, first_key, tile_pos, ahead)

    @inlined
    def apply(acc_s, mask_bits, place, needs_mask, arrays, strides, score):
        """acc_s <- score_mod of scale * acc_s, for scores that count; mask_bits <- without what mask_mod removes."""
        for r in range(2 * strips):
            if place.first_row + r * 8 > place.last_row:  # a row that does not exist
                for word in range(words):
                    mask_bits[r * words + word] = uint32(0)
        every_block(acc_s, mask_bits, place, FALSE, needs_mask, arrays, strides, score)

    @inlined
    def apply_inside(acc_s, mask_bits, place, needs_mask, arrays, strides, score):
        """Likewise, for a tile whose keys all rows see. If the tile has several heads' queries, functions are called
        with the last row that exists in place of those that do not."""
        if has_score_mod and needs_mask:  # score_mod only for scores that mask_mod leaves
            apply(acc_s, mask_bits, place, needs_mask, arrays, strides, score)
        else:
            # Without a score_mod this is called where mask_mod decides.
            alone = FALSE if has_score_mod else TRUE
            every_block(acc_s, mask_bits, place, TRUE, alone, arrays, strides, score)

    every_tile = has_score_mod or config.packed and has_mask_mod  # packed sequences have no states of tiles
    return named(place_of, apply, apply_inside, present=present, every_tile=every_tile)
