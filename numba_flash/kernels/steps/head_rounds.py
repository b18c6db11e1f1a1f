"""In which order tiles of many heads are taken: some heads at a time, so that what they read stays in L2."""

from numba import int32

from .inlined import inlined
from .integers import divide

MANY_TILES = 1024  # of a round: several for each multiprocessor, so that it ends with short ones


@inlined
def in_rounds(t, tiles, head_tiles, at_once):
    """-> (head, rank) of the t-th of all tiles, of which each head has `tiles`: of `at_once` heads all first ones, then
    all second ones. `head` counts through the batch."""
    a_round = at_once * tiles
    rounds = divide(t, a_round)
    in_round = t - rounds * a_round
    first_head = rounds * at_once
    heads_here = min(at_once, max(head_tiles - first_head, 1))
    rank = divide(in_round, heads_here)
    return first_head + (in_round - rank * heads_here), rank


@inlined
def heads_of_round(tiles, head_tiles, unequal):
    """at_once for work that reads little: rounds of about MANY_TILES, all of a size. Where all tiles take as long, one
    head after the other."""
    rounds = divide(int32(head_tiles * tiles + int32(MANY_TILES - 1)), MANY_TILES)
    return int32(divide(int32(head_tiles + rounds - int32(1)), max(rounds, int32(1))) if unequal else 1)
