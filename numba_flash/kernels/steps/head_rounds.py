"""The order in which tiles of many heads are taken: some heads at a time, so that what they read stays in L2."""

from numba import int32

from .basics import FALSE, divide, inlined

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
def entry_and_head(number, batch, heads, by_entries):
    """-> (b, head) of the number-th of all heads. Heads of one batch entry follow each other. With by_entries the same
    head of all entries does, so that concurrent blocks read the same of what entries share."""
    if by_entries:
        head = divide(int32(number), int32(batch))
        b = int32(int32(number) - head * int32(batch))
    else:
        b = divide(int32(number), int32(heads))
        head = int32(int32(number) - b * int32(heads))
    return b, head


def bias_of_entries(config):
    """-> (strides) -> whether all batch entries share one bias, a device function."""
    has_bias = config.has("bias")

    @inlined
    def shared(strides):
        return strides.bias[0] == 0 if has_bias else FALSE

    return shared


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
