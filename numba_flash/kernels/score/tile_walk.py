"""Which key tiles a query tile loops over under a mask_mod, from the states of tile_states.py: from the last to the
first, without those in which nothing is seen. For a kernel that owns keys, which query tiles a key tile loops over.

Without a mask_mod these functions loop over all tiles, and leave no code.
"""

import functools

from numba import int32, uint32

from ...abi.parameters import STATES_IN_WORD, TILE_STATES_OF_KEYS
from ...ptx import bits, shfl
from ..steps.basics import FALSE, TRUE, divide, inlined, named

SHIFT = STATES_IN_WORD.bit_length() - 1
LAST, EVERY = STATES_IN_WORD - 1, (1 << STATES_IN_WORD) - 1
assert SHIFT == 4, "a word has 16 bits of either kind"


@functools.cache
def _states(of_keys):
    @inlined
    def states_of(arrays, strides):
        if of_keys:
            return arrays.tile_states_of_keys, strides.tile_states_of_keys
        return arrays.tile_states, strides.tile_states

    return states_of


def states_of(config):
    """-> states_of(arrays, strides) -> (the states of tiles, their strides)."""
    return _states(config.tile_states == TILE_STATES_OF_KEYS)


@functools.cache
def make(config, whole_warp=False):
    """Device functions. row: where the states of the block's own tile begin. whole_warp: all lanes of a warp call these
    functions together, and the compiler may rely on it."""
    present, find = bool(config.tile_states), states_of(config)
    asks = TRUE if config.has("mask_mod") else FALSE  # without states of tiles: packed sequences, and pages, have none
    own_rows, heads = (config.states_tile.own, config.states_tile.heads) if present else (1, 1)

    @inlined
    def row(b, h, first_row, arrays, strides):
        if not present:
            return int32(0)
        _, by = find(arrays, strides)
        return int32(b * by[0] + divide(h, heads) * by[1] + divide(first_row, own_rows) * by[2])

    @inlined
    def word_of(row, number, arrays, strides):
        states, _ = find(arrays, strides)
        word = uint32(states[row + number])
        return shfl.idx_b32(word, 0) if whole_warp else word

    @inlined
    def trim(row, begin, stop, arrays, strides):
        """-> [begin, stop) without empty tiles at its ends."""
        if not present:
            return begin, stop
        first, last = int32(stop), int32(begin - 1)
        number = int32(begin >> SHIFT)
        while number << SHIFT < stop:
            word = word_of(row, number, arrays, strides) & uint32(EVERY)  # the bits of tiles outside are 0
            if word != 0:
                first = min(first, int32((number << SHIFT) + bits.highest(word & (~word + uint32(1)))))
                last = int32((number << SHIFT) + bits.highest(word))
            number = int32(number + 1)
        return first, int32(last + 1)

    @inlined
    def last(row, j, begin, arrays, strides):
        """-> the last tile of [begin, j] that is not empty."""
        if not present:
            return j
        found = int32(begin - 1)  # if there is none
        while j >= begin:
            word = word_of(row, int32(j >> SHIFT), arrays, strides) & (uint32(EVERY) >> uint32(LAST - (j & LAST)))
            j = int32((j >> SHIFT) << SHIFT)
            if word != 0:
                found, j = max(found, int32(j + bits.highest(word))), int32(begin)
            j = int32(j - 1)
        return found

    @inlined
    def next_tile(row, j, begin, arrays, strides):
        """-> the tile after j, or begin - 1 if none is left."""
        return last(row, int32(j - 1), begin, arrays, strides) if present else j - 1

    @inlined
    def first(row, j, stop, arrays, strides):
        """-> the first one of [j, stop)."""
        if not present:
            return j
        found = int32(stop)  # if there is none
        while j < stop:
            word = word_of(row, int32(j >> SHIFT), arrays, strides) & uint32((EVERY << (j & LAST)) & EVERY)
            j = int32((j >> SHIFT) << SHIFT)
            if word != 0:
                found, j = min(found, int32(j + bits.highest(word & (~word + uint32(1))))), int32(stop)
            j = int32(j + STATES_IN_WORD)
        return found

    @inlined
    def is_nonempty(row, j, arrays, strides):
        """-> whether something is seen in tile j."""
        if not present:
            return True
        word = word_of(row, int32(j >> SHIFT), arrays, strides)
        return (word >> uint32(j & LAST)) & uint32(1) != 0

    @inlined
    def needs_mask(row, j, arrays, strides):
        """-> whether mask_mod decides there."""
        if not present:
            return asks
        word = word_of(row, int32(j >> SHIFT), arrays, strides)
        return (word >> uint32(STATES_IN_WORD + (j & LAST))) & uint32(1) != 0

    return named(row, trim, next_tile, last, first, is_nonempty, needs_mask, present=present)
