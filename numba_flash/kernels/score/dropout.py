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
