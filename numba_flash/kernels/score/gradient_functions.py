"""Applies the caller's own functions in a backward: to a tile of S and of dP - delta in a warp's accumulators, in the
layout of fragments.py.

It does what fragment_functions.py does for O, and also applies the derivative of score_mod: dS = P * (dP - delta) *
derivative. dP - delta is ready when the functions are called, so it is multiplied by the derivative at once, and no
register holds the derivative until dS. A derivative that is the constant 1 multiplies nothing.

A function is called only for scores that count. So every tile has its bits, and mask_mod clears some of them. Rows of
the tile are queries and columns keys; with of_keys it is the other way around.
"""

import functools
from typing import Any, NamedTuple

from numba import int32, uint32

from ..steps.basics import inlined
from ..steps.repeated import repeated
from . import At, at_position, user


class LanePlace(NamedTuple):
    """Where the scores of a lane lie: its first query and its first key, of a head whose query 0 is at q_start."""

    b: Any
    h: Any
    first_query: Any
    q_start: Any
    first_key: Any


@functools.cache
def on_fragments(config, strips, columns, of_keys, derivative=True):
    """-> apply(acc_s, acc_dp, shown_bits, LanePlace, needs_mask, arrays, strides, score), a device function for a tile
    of `columns` columns, of which a warp has `strips` strips of 16 rows.

    For scores whose bit in shown_bits (a word for each row) is set: acc_s <- score_mod of scale * acc_s, and acc_dp <-
    acc_dp times its derivative. shown_bits <- without what mask_mod removes. derivative: dS is computed; otherwise
    acc_dp does not change.
    """
    blocks, changed, has_mask_mod = columns // 8, user.both(config, derivative), user.calls_mask_mod(config)
    scales_dp = derivative and config.has("score_mod")

    @inlined
    def block(n, acc_s, acc_dp, shown_bits, place, needs_mask, arrays, strides, score):
        """Block n of 8 columns."""
        # The inner loop goes over rows: with columns inside, the compiler would keep the positions of all columns.
        for i in range(2):
            column, bit = n * 8 + i, uint32(1) << uint32(2 * n + i)
            for r in range(2 * strips):
                index = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                if shown_bits[r] & bit != 0:
                    query = int32(place.first_query + (column if of_keys else r * 8))
                    key = int32(place.first_key + (r * 8 if of_keys else column))
                    at = at_position(place.b, place.h, query, key, place.q_start + query)
                    acc_s[index], slope, seen = changed(acc_s[index], at, needs_mask, arrays, strides, score)
                    if scales_dp:
                        acc_dp[index] *= slope
                    if has_mask_mod:
                        if not seen:
                            shown_bits[r] &= ~bit

    return repeated(block, blocks if user.present(config) else 0)


@functools.cache
def of_bits(config, columns, of_keys):
    """-> ask(shown_bits, b, h, first_query, q_start, first_key, arrays, strides), a device function: shown_bits <-
    without what mask_mod removes, of a strip of 16 rows of a tile of `columns` columns; the rest as in on_fragments. It
    needs no score, so it can run during S."""
    visible = user.make(config, "mask_mod") if user.calls_mask_mod(config) else None
    way = 1 if of_keys else -1  # 1 if columns are queries

    @inlined
    def block(n, shown_bits, b, h, first_query, q_start, first_key, arrays, strides):
        """Block n of 8 columns."""
        for i in range(2):
            column, bit = n * 8 + i, uint32(1) << uint32(2 * n + i)
            for r in range(2):
                if shown_bits[r] & bit != 0:
                    query = int32(first_query + (column if of_keys else r * 8))
                    key = int32(first_key + (r * 8 if of_keys else column))
                    ahead = q_start + first_query - first_key + way * (column - r * 8)
                    if not visible(At(b, h, query, key, q_start + query, ahead), arrays, strides):
                        shown_bits[r] &= ~bit

    return repeated(block, columns // 8 if visible is not None else 0)
