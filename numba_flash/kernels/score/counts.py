"""Dropout: some weights of a row do not count in its output, and the others count 1 / (1 - dropout_p) times as much.

Which ones follows from the seed and the position alone, so it is the same in every kernel, tile and backward. The
random bits are those of Philox 4x32 with 7 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011),
and the seed is its key. One counter (keys, q_pos, h, b) gives four words of 32 bits, those of the even keys k, k + 8,
k + 16 and k + 24 of 32 that begin at a multiple of 32, and of the odd keys behind them: in a fragment whose rows are
queries these are one lane's. An even key has the lower 16 bits of its word, an odd one the upper ones. A weight is
dropped where its number is below dropout_p * 2^16. The maximum, the sum and lse are those without dropout.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint32, uint64

from ...ptx import bits, shfl
from ..steps import elements
from ..steps.inlined import inlined

ROUNDS = 7
MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)
bfly_b32, multiply_wide = shfl.bfly_b32, bits.multiply_wide


@inlined
def low(x):
    """The lower 32 bits of an unsigned number."""
    return uint32(uint64(x) & LOW)


@inlined
def random_words(seed, keys, q_pos, h, b):
    """Four words of 32 bits, of one counter."""
    x, y, z, w = low(keys), low(q_pos), low(h), low(b)
    key, other = low(seed), low(uint64(seed) >> uint64(32))
    for _ in range(ROUNDS):
        first, second = multiply_wide(x, MULTIPLIERS[0]), multiply_wide(z, MULTIPLIERS[1])
        x, y = uint32(low(second >> uint64(32)) ^ y ^ key), low(second)
        z, w = uint32(low(first >> uint64(32)) ^ w ^ other), low(first)
        key, other = low(uint64(key) + uint64(WEYL[0])), low(uint64(other) + uint64(WEYL[1]))
    return x, y, z, w


@inlined
def keys_of(k_pos):
    """Which keys share the counter of key k_pos."""
    return ((int64(k_pos) >> int64(5)) << int64(2)) | ((int64(k_pos) & int64(7)) >> int64(1))


@inlined
def word_of(words, k_pos):
    """The word of key k_pos among those of its counter."""
    place = (int64(k_pos) >> int64(3)) & int64(3)
    first = words[0] if place == 0 else words[1]
    return uint32(first if place < 2 else (words[2] if place == 2 else words[3]))


@inlined
def lower_half(word):
    """The number of an even key."""
    return int32(uint32(word) & uint32(0xFFFF))


@inlined
def upper_half(word):
    """The number of the odd key behind it."""
    return int32(uint32(word) >> uint32(16))


@functools.cache
def make(config: Any) -> Any:
    """-> count(at, arrays, sizes, score), a device function: what a weight counts, 0 or 1 / (1 - dropout_p)."""
    present = config.seeded
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def count(at, arrays, sizes, score):
        found = compute(1)
        if present:
            words = random_words(arrays.seed, keys_of(at.k_index), at.q_pos, at.h, at.b)
            word = word_of(words, at.k_index)
            number = upper_half(word) if int64(at.k_index) & int64(1) != 0 else lower_half(word)
            found = compute(0) if number < sizes.drop_below else compute(score.kept_count)
        return found

    return count


class FragmentCounts(NamedTuple):
    """Device functions for a tile in a warp's accumulators, in the layout of fragments.py. `kept` has a bit for each of
    the lane's scores, in the order of mask bits."""

    present: bool
    words: int  # of kept
    of_queries: Callable[..., Any]  # kept of a tile whose rows are queries
    of_keys: Callable[..., Any]  # kept of one whose rows are keys
    drop: Callable[..., Any]  # p <- 0 where it does not count
    scale: Callable[..., Any]  # (inverse_l, score): what counts, counts more


@functools.cache
def on_fragments(config: Any, strips: int, columns: int) -> FragmentCounts:
    """Of a tile of so many columns, of which a warp has `strips` strips of 16 rows."""
    group, blocks, rows = config.group_size, columns // 8, 2 * strips
    words = -(-blocks // 16) * rows if config.seeded else 1
    real = elements.COMPUTE_TYPES[config.dtype]
    at_once = min(columns & -columns, 32) // 8  # blocks of 8 keys; a tile begins at a multiple of as many keys

    # Bits are pushed in at the low end, the last score's first. A comparison would become a jump around each.
    @inlined
    def push(bits, number, most):
        """Of a score whose weight is dropped if its number is at most `most`: the sign of what is left says it."""
        return uint32(uint32(bits << uint32(1)) | uint32(uint32(int32(most - number)) >> uint32(31)))

    @inlined
    def push_both(bits, word, most):
        """Of a block's two columns, which are an even key and the odd one behind it."""
        return push(push(bits, upper_half(word), most), lower_half(word), most)

    @inlined
    def nothing(kept, first_key, b, h, first, tile_pos, seed, below):
        pass

    def and_word(before: Any, r: int, begin: int) -> Any:
        """Behind other words that of row r from block `begin` on: a function of its own, because the compiler does not
        unroll a loop over all that a long function would make, and then `kept` would lie in memory."""
        end = min(begin + 16, blocks)

        @inlined
        def of_word(kept, first_key, b, h, first, tile_pos, seed, below):
            before(kept, first_key, b, h, first, tile_pos, seed, below)
            row = int32(first + r * 8)
            query = int32(uint32(row) // uint32(group))
            head, q_pos = int32(h + row - query * group), int64(tile_pos + query)
            bits, most = uint32(0), int32(int32(below) - 1)
            for step in range((end - begin) // at_once):
                k_pos = int64(first_key + (end - (step + 1) * at_once) * 8)
                found = random_words(seed, keys_of(k_pos), q_pos, head, b)
                if at_once == 4:
                    bits = push_both(push_both(bits, found[3], most), found[2], most)
                    bits = push_both(push_both(bits, found[1], most), found[0], most)
                elif at_once == 1:
                    bits = push_both(bits, word_of(found, k_pos), most)
                else:
                    begins = k_pos & int64(16) == 0
                    bits = push_both(bits, found[1] if begins else found[3], most)
                    bits = push_both(bits, found[0] if begins else found[2], most)
            kept[r * (words // rows) + begin // 16] = bits

        return of_word

    def and_rows(before: Any, r: int) -> Any:
        """The same for rows r and r + 1, which are keys.

        A counter has the keys of this lane and of lane ^ 4, whose columns are the same two queries. So each of the two
        lanes asks for one query, and hands over the numbers of the other's keys.
        """

        @inlined
        def of_rows(kept, first_q_pos, b, h, first_key, tile_pos, seed, below):
            before(kept, first_q_pos, b, h, first_key, tile_pos, seed, below)
            k_pos = int64(first_key + r * 8)
            begins, odd = k_pos & int64(16) == 0, k_pos & int64(1)
            upper, lower, most = uint32(0), uint32(0), int32(int32(below) - 1)
            for step in range(blocks):
                n = blocks - 1 - step
                found = random_words(seed, keys_of(k_pos), int64(first_q_pos + n * 8) + odd, h, b)
                one, other = uint32(found[0] if begins else found[2]), uint32(found[1] if begins else found[3])
                of_even = uint32((one & uint32(0xFFFF)) | uint32(other << uint32(16)))  # of rows r and r + 1
                of_odd = uint32((one >> uint32(16)) | (other & uint32(0xFFFF0000)))
                mine, handed = (of_odd, of_even) if odd != 0 else (of_even, of_odd)
                came = bfly_b32(handed, 4)
                first, second = (came, mine) if odd != 0 else (mine, came)  # of the lane's two queries
                upper = push(push(upper, lower_half(second), most), lower_half(first), most)
                lower = push(push(lower, upper_half(second), most), upper_half(first), most)
            kept[r] = upper
            kept[r + 1] = lower

        return of_rows

    every_word = every_row = nothing
    for r in range(rows if config.seeded else 0):
        for begin in range(0, blocks, 16):
            every_word = and_word(every_word, r, begin)
        if r % 2 == 0:
            every_row = and_rows(every_row, r)

    @inlined
    def of_queries(kept, first_key, b, h, first, tile_pos, arrays, sizes):
        """first_key: the lane's first column's. first: the lane's first row in the query tile, whose first query is at
        position tile_pos; h: the head of the tile's first row."""
        every_word(kept, first_key, b, h, first, tile_pos, arrays.seed, uint32(sizes.drop_below))

    @inlined
    def of_keys(kept, first_q_pos, b, h, first_key, arrays, sizes):
        """first_q_pos: of the lane's first column. first_key: its first row's."""
        every_row(kept, first_q_pos, b, h, first_key, int64(0), arrays.seed, uint32(sizes.drop_below))

    @inlined
    def drop(p, kept):
        for r in range(rows):
            for n in range(blocks):
                for i in range(2):
                    if uint32(kept[r * (words // rows) + n // 16] & uint32(1 << (2 * (n % 16) + i))) == uint32(0):
                        p[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i] = real(0)

    @inlined
    def scale(inverse_l, score):
        for r in range(rows):
            inverse_l[r] *= score.kept_count

    return FragmentCounts(config.seeded, words, of_queries, of_keys, drop, scale)
