"""Scores of one tile in a warp's accumulators: finished where they need more than a scale, and masked.

acc_s is (strips, tile_n / 8, 4): strips of 16 rows below each other; a lane holds the rows lane // 4 and
8 below of each strip and two of every eight columns (ptx/fragments.py). So a lane has 2 * strips rows,
row r being element pair (4 * n + 2 * (r % 2)) of strip r // 2.
"""

import math

from numba import float32, int32, int64, uint32

from ...ptx import approx
from .inlined import inlined
from .plain import first_column_of, first_row_of

LOG2_E = 1.4426950408889634
SMALL = 0.25  # below it tanh is a polynomial: 1 - 2 / (1 + e^2x) would lose the digits that x has


@inlined
def tanh(x):
    square = x * x
    odd = x + x * square * (float32(-1 / 3) + square * (float32(2 / 15) + square * float32(-17 / 315)))
    large = float32(1) - float32(2) * approx.rcp(float32(1) + approx.ex2(x * float32(2 * LOG2_E)))
    return odd if abs(x) < float32(SMALL) else large


@inlined
def columns_below(limit, word):
    """Bits for those of the lane's columns of 16 blocks of 8, two each, that are below `limit`, counted from its
    first column of all; word: which 16 blocks."""
    here = min(max(int32(limit - 128 * word), int32(0)), int32(128))
    count = int32(((here >> 3) << 1) + min(here & 7, 2))
    return uint32((int64(1) << int64(count)) - int64(1))


@inlined
def columns_within(first, end, word):
    """The same for those in [first, end)."""
    # As bits, one for each element of a row: ptxas turns eight of them into predicates at a time, where comparing
    # each column with both limits takes three instructions.
    return columns_below(end, word) & ~columns_below(first, word)


@inlined
def clamp(x):
    """An int64 as int32; what is beyond any tile stays so."""
    return int32(min(max(x, int64(-(1 << 28))), int64(1 << 28)))


def make(config, strips):
    """-> (seen_count, one, visible, finish, mask): how many words of bits a lane's rows take, and device functions."""
    tile_n, group = config.tile_n, config.group
    blocks = tile_n // 8
    words = -(-blocks // 16)
    has_softcap, has_alibi = config.softcap, config.alibi_dtype is not None
    minus_inf = float32(-math.inf)
    log2_e = float32(LOG2_E)

    @inlined
    def one(product, slope, distance, scale, softcap):
        """The finished score of one product q . k in units of log2(e); distance: q_pos - k_pos."""
        if has_softcap:
            s = tanh(product * (scale / softcap)) * (softcap * log2_e)
        else:
            s = product * (scale * log2_e)
        if has_alibi:
            s -= slope * log2_e * abs(distance)
        return s

    @inlined
    def visible(j, first_row, lane, tile_pos, left, right, keys, seen, distance):
        """seen (2 * strips, words) <- bits for those of the lane's columns of tile j that its rows see.

        first_row: the warp's, in the query tile, which begins at position tile_pos. Also distance, for `finish`. It
        needs no score: a place for it is where they are still being computed.
        """
        # ranges.row_keys, counted from the tile's first key: behind the clamp 32 bits hold every sum.
        tile_key, column = int64(j) * tile_n, int32(first_column_of(lane))
        lowest, highest = clamp(tile_pos - left - tile_key), clamp(tile_pos + right + 1 - tile_key)
        keys_left = int32(keys - tile_key)
        for r in range(2 * strips):
            query = int32(uint32(first_row + first_row_of(lane) + r * 8) // uint32(group))
            first = int32(lowest + query - column)
            end = int32(min(int32(highest + query), keys_left) - column)
            for word in range(words):
                seen[r * words + word] = columns_within(first, end, word)
            distance[r] = float32(tile_pos + query - tile_key - column)

    @inlined
    def finish(acc_s, slopes, distance, scale, softcap):
        """acc_s <- finished scores. slopes, distance (2 * strips,): of the lane's rows, at its first column."""
        for strip in range(strips):
            for n in range(blocks):
                for i in range(4):
                    at = (strip * blocks + n) * 4 + i
                    r = strip * 2 + i // 2
                    acc_s[at] = one(acc_s[at], slopes[r], distance[r] - float32(n * 8 + i % 2), scale, softcap)

    @inlined
    def mask(acc_s, seen):
        """acc_s <- -inf where `visible` left no bit."""
        for r in range(2 * strips):
            for n in range(blocks):
                for i in range(2):
                    if (seen[r * words + n // 16] >> uint32(2 * (n % 16) + i)) & uint32(1) == 0:
                        acc_s[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i] = minus_inf

    return 2 * strips * words, one, visible, finish, mask
