"""The order in which tiles of many heads are taken: some heads at a time, so that what they read stays in L2."""

from numba import int32

from .inlined import inlined
from .integers import divide

MANY_TILES, MOST_HEADS = 256, 16  # in a round: about two for each multiprocessor, but several of each head


@inlined
def in_rounds(t, tiles, head_tiles, at_once):
    """-> (head, rank) of the t-th of all tiles, `tiles` for each head: the first tiles of `at_once` heads, then their
    second tiles. `head` counts through the batch."""
    a_round = at_once * tiles
    rounds = divide(t, a_round)
    in_round = t - rounds * a_round
    first_head = rounds * at_once
    heads_here = min(at_once, max(head_tiles - first_head, 1))
    rank = divide(in_round, heads_here)
    return first_head + (in_round - rank * heads_here), rank


@inlined
def entry_and_head(number, heads):
    """-> (b, head) of the number-th of all heads."""
    b = divide(int32(number), int32(heads))
    return b, int32(int32(number) - b * int32(heads))


@inlined
def heads_of_round(tiles, unequal):
    """at_once for tiles of which the first take longest: enough heads for a round to end with short tiles. If all tiles
    take equally long, one head comes after the other.

    With 8 tiles of each of 128 heads at a time (head_dim 256, 1k), every tile read its K and V from memory, and that
    took 7 % longer than one head after the other (H200).
    """
    return int32(
        min(max(divide(int32(MANY_TILES), max(int32(tiles), int32(1))), int32(1)), MOST_HEADS) if unequal else 1
    )
