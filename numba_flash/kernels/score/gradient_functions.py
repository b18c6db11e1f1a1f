"""The caller's own functions in a backward: on a tile of S and of dP - delta in a warp's accumulators, the layout of
which is that of fragments.py, and on one score alone.

What fragment_functions.py does for O, with the derivative of score_mod, by which dS = P * (dP - delta) * derivative has
to be multiplied. Where the functions are asked, dP - delta is there. So the derivative goes into it at once, and no
register keeps it until dS. A derivative that is 1 is a constant of the code, and multiplies nothing.

A function is asked only about scores that count; so every tile has its bits, and mask_mod takes bits away. Rows of the
tile are queries and columns keys; with of_keys it is the other way around.
"""

import functools
from typing import Any

from numba import int32, uint32

from ..steps import numbers
from ..steps.inlined import inlined
from . import At, Placed, user


@functools.cache
def alone(config: Any, derivative: bool) -> Any:
    """-> ask(product, at, asks, arrays, strides, score), a device function: (product, slope, whether it counts). Where
    there is a score_mod, that is what it makes of scale * product. slope: its derivative, or 1 where none is asked for.
    asks: whether mask_mod decides here (tile_walk.py)."""
    has_score_mod, has_mask_mod = config.has("score_mod"), config.has("mask_mod")
    one = numbers.of(config.compute_dtype).real(1)

    @inlined
    def unchanged(s, at, arrays, strides):
        return s, one

    @inlined
    def all_visible(at, arrays, strides):
        return True

    with_slope = unchanged
    if has_score_mod:
        made = user.make(config, "score_mod", derivative)
        with_slope = made if derivative else _with_one(made, one)
    visible = user.make(config, "mask_mod") if has_mask_mod else all_visible

    @inlined
    def ask(product, at, asks, arrays, strides, score):
        seen, slope = True, one
        if has_mask_mod:
            if asks:
                seen = visible(at, arrays, strides)
        if has_score_mod:
            if seen:
                product, slope = with_slope(product * score.scale, at, arrays, strides)
        return product, slope, seen

    return ask


def _with_one(value: Any, one: Any) -> Any:
    @inlined
    def with_one(s, at, arrays, strides):
        return value(s, at, arrays, strides), one

    return with_one


def present(config: Any) -> bool:
    """Whether the problem has a function."""
    return config.has("score_mod") or config.has("mask_mod")


@functools.cache
def on_fragments(config: Any, strips: int, columns: int, of_keys: bool, derivative: bool = True) -> Any:
    """-> apply, a device function for a tile of so many columns, of which a warp has `strips` strips of 16 rows.
    derivative: dS is made; else acc_dp is left alone."""
    blocks, has_mask_mod = columns // 8, config.has("mask_mod")
    scales_dp = derivative and config.has("score_mod")
    ask = alone(config, derivative)

    @inlined
    def nothing(acc_s, acc_dp, shown_bits, b, h, first_query, q_start, first_key, asks, arrays, strides, score):
        pass

    def and_block(before: Any, n: int) -> Any:
        """Behind other blocks of 8 columns the n-th. Each is a function of its own, because the compiler unrolls no
        loop over all that a long function would make, and then the scores would lie in memory."""

        @inlined
        def block(acc_s, acc_dp, shown_bits, b, h, first_query, q_start, first_key, asks, arrays, strides, score):
            before(acc_s, acc_dp, shown_bits, b, h, first_query, q_start, first_key, asks, arrays, strides, score)
            # Rows inside: the other way round the compiler would keep the positions of all columns.
            for i in range(2):
                column, bit = n * 8 + i, uint32(1) << uint32(2 * n + i)
                for r in range(2 * strips):
                    place = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                    if shown_bits[r] & bit != 0:
                        query = int32(first_query + (column if of_keys else r * 8))
                        key = int32(first_key + (r * 8 if of_keys else column))
                        at = At(b, h, query, key, q_start + query)
                        acc_s[place], slope, seen = ask(acc_s[place], at, asks, arrays, strides, score)
                        if scales_dp:
                            acc_dp[place] *= slope
                        if has_mask_mod:
                            if not seen:
                                shown_bits[r] &= ~bit

        return block

    apply = nothing
    for n in range(blocks if present(config) else 0):
        apply = and_block(apply, n)

    # acc_s <- what score_mod makes of scale * acc_s, acc_dp <- times its derivative, where shown_bits, a word for each
    # row, say that a score counts; shown_bits <- what mask_mod leaves of them. first_query, first_key: the lane's, of
    # a head; query 0 is at position q_start.
    return apply


@functools.cache
def of_bits(config: Any, columns: int, of_keys: bool) -> Any:
    """-> ask, a device function: mask_mod alone, on a strip of 16 rows of a tile of so many columns, beside S. It needs
    no score."""
    visible = user.make(config, "mask_mod", placed=True) if config.has("mask_mod") else None
    way = 1 if of_keys else -1  # columns of queries lead ahead

    @inlined
    def nothing(shown_bits, b, h, first_query, q_start, first_key, arrays, strides):
        pass

    def and_block(before: Any, n: int, inside: bool) -> Any:
        """As in on_fragments. inside: all scores count so far, and without a jump around each, one is asked about
        beside the others."""

        @inlined
        def block(shown_bits, b, h, first_query, q_start, first_key, arrays, strides):
            before(shown_bits, b, h, first_query, q_start, first_key, arrays, strides)
            for i in range(2):
                column, bit = n * 8 + i, uint32(1) << uint32(2 * n + i)
                for r in range(2):
                    if inside or shown_bits[r] & bit != 0:
                        query = int32(first_query + (column if of_keys else r * 8))
                        key = int32(first_key + (r * 8 if of_keys else column))
                        ahead = q_start + first_query - first_key + way * (column - r * 8)
                        if not visible(Placed(b, h, query, key, q_start + query, ahead), arrays, strides):
                            shown_bits[r] &= ~bit

        return block

    guarded, inside, every_bit = nothing, nothing, uint32((1 << (columns // 4)) - 1)
    for n in range(columns // 8 if visible is not None else 0):
        guarded, inside = and_block(guarded, n, False), and_block(inside, n, True)

    @inlined
    def ask(shown_bits, b, h, first_query, q_start, first_key, arrays, strides):
        """shown_bits <- what mask_mod leaves of them; the other arguments are those of on_fragments."""
        if shown_bits[0] & shown_bits[1] & every_bit == every_bit:  # bits past the tile may be set, too
            inside(shown_bits, b, h, first_query, q_start, first_key, arrays, strides)
        else:
            guarded(shown_bits, b, h, first_query, q_start, first_key, arrays, strides)

    return ask
