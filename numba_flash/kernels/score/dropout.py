"""Dropout: some weights of a row do not count in its output, and the others count 1 / (1 - dropout_p) times as much.

Which ones follows from the seed and the position alone, so it is the same in every kernel, tile and backward: the random
bits are Philox 4x32 with 7 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011), the seed is its
key. One counter (keys, q_pos, h, b) gives four words of 32 bits, those of the keys k, k + 8, k + 16 and k + 24 of 32
that begin at a multiple of 32: in a fragment these are one lane's. A weight is dropped where its word is below
dropout_p * 2^32. The maximum, the sum and lse are those without dropout.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint32, uint64

from ..steps import elements
from ..steps.inlined import inlined
from ..steps.plain import first_column_of, first_row_of

ROUNDS = 7
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)


@inlined
def random_words(seed, keys, q_pos, h, b):
    """Four words of 32 bits, each in 64, of one counter."""
    x, y, z, w = uint64(keys) & LOW, uint64(q_pos) & LOW, uint64(h) & LOW, uint64(b) & LOW
    key, other = uint64(seed) & LOW, uint64(seed) >> uint64(32)
    for _ in range(ROUNDS):
        first, second = x * MULTIPLIERS[0], z * MULTIPLIERS[1]
        x, y = (second >> uint64(32)) ^ y ^ key, second & LOW
        z, w = (first >> uint64(32)) ^ w ^ other, first & LOW
        key, other = (key + WEYL[0]) & LOW, (other + WEYL[1]) & LOW
    return x, y, z, w


@inlined
def keys_of(k_pos):
    """Which keys share the counter of key k_pos."""
    return ((int64(k_pos) >> int64(5)) << int64(3)) | (int64(k_pos) & int64(7))


@inlined
def word_of(words, k_pos):
    """The word of key k_pos among those of its counter."""
    place = (int64(k_pos) >> int64(3)) & int64(3)
    low = words[0] if place == 0 else words[1]
    return low if place < 2 else (words[2] if place == 2 else words[3])


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
            found = compute(0) if word_of(words, at.k_index) < uint64(sizes.drop_below) else compute(score.kept_count)
        return found

    return count


class FragmentCounts(NamedTuple):
    """Device functions for weights in a warp's accumulators, in the layout of fragments.py."""

    present: bool
    drop: Callable[..., Any]  # p of a tile <- 0 where it does not count
    scale: Callable[..., Any]  # (inverse_l, score): what counts, counts more


@functools.cache
def on_fragments(config: Any, strips: int = 1) -> FragmentCounts:
    """Of a tile of config.tile_n keys, of which a warp has `strips` strips of 16 queries."""
    group, tile_n, blocks = config.group_size, config.tile_n, config.tile_n // 8
    real = elements.COMPUTE_TYPES[config.dtype]
    at_once = 4 if tile_n % 32 == 0 else 2  # blocks of 8 keys; a tile begins at a multiple of 32, or of 16

    @inlined
    def drop_one(p, place, word, below):
        if word < below:
            p[place] = real(0)

    @inlined
    def nothing(p, first_key, b, h, first, tile_pos, seed, below):
        pass

    def and_blocks(before: Any, n: int) -> Any:
        """Behind other blocks those from the n-th on: a function of its own, as in fragment_functions.py."""

        @inlined
        def drop_blocks(p, first_key, b, h, first, tile_pos, seed, below):
            before(p, first_key, b, h, first, tile_pos, seed, below)
            for i in range(2):
                k_pos = int32(first_key + n * 8 + i)
                for r in range(2 * strips):
                    row = int32(first + r * 8)
                    query = int32(uint32(row) // uint32(group))
                    head = int32(h + row - query * group)
                    words = random_words(seed, keys_of(k_pos), int64(tile_pos + query), head, b)
                    place = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                    if at_once == 4:
                        drop_one(p, place, words[0], below)
                        drop_one(p, place + 4, words[1], below)
                        drop_one(p, place + 8, words[2], below)
                        drop_one(p, place + 12, words[3], below)
                    else:
                        begins = k_pos & 16 == 0
                        drop_one(p, place, words[0] if begins else words[2], below)
                        drop_one(p, place + 4, words[1] if begins else words[3], below)

        return drop_blocks

    every_block = nothing
    for n in range(0, blocks, at_once):
        every_block = and_blocks(every_block, n)

    @inlined
    def drop(p, j, b, h, first_row, lane, tile_pos, arrays, sizes):
        """first_row: the warp's, in the query tile, whose first query is at position tile_pos; h: its first row's."""
        first, first_key = int32(first_row + first_row_of(lane)), int32(j * tile_n + first_column_of(lane))
        every_block(p, first_key, b, h, first, tile_pos, arrays.seed, uint64(sizes.drop_below))

    @inlined
    def scale(inverse_l, score):
        for r in range(2 * strips):
            inverse_l[r] *= score.kept_count

    return FragmentCounts(config.seeded, drop, scale)
