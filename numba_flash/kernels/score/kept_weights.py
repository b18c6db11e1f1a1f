"""Dropout: some weights of a row are 0 in its output, and the others are multiplied by 1 / (1 - dropout_p).

The seed and the position alone decide which, so the result is the same in every kernel, tile and backward. The random
bits are those of Philox 4x32 with 7 rounds (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011); the seed
is its key. One counter (keys, q_pos, h, b) gives four words of 32 bits for eight keys: let k be a multiple of 4 in the
first half of 16 keys that begin at a multiple of 16. The lower 16 bits of the words belong to keys k to k + 3, the
upper 16 bits to keys k + 8 to k + 11. A weight is kept if its number is below (1 - dropout_p) * 2^16. The maximum, the
sum and lse are those without dropout.

So the keys of a counter lie in 16 rows of a fragment whose rows are keys, and in 16 columns of one whose columns are
keys. Several lanes of a warp share them: two lanes if columns are keys, four if rows are, which also share some
queries. Each lane computes different counters, and they exchange the results, a bit for each weight: no number is
computed twice.
"""

import functools

import numpy as np
from numba import cuda, int32, int64, uint32, uint64

from ...ptx import bits, local, shfl, special
from ..steps import elements
from ..steps.basics import inlined, named
from ..steps.bit_exchange import exchange
from ..steps.repeated import repeated

ROUNDS = 7
MULTIPLIERS = (np.uint32(0xD2511F53), np.uint32(0xCD9E8D57))
WEYL = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
LOW = np.uint64(0xFFFFFFFF)


@inlined
def low(x):
    """The lower 32 bits of an unsigned number."""
    return uint32(uint64(x) & LOW)


@inlined
def again(seed):
    """The seed, hidden from the compiler: the round keys are then computed where they are needed, not kept in registers
    through a loop over tiles."""
    half = uint64(32)
    upper, lower = special.opaque(int32(low(uint64(seed) >> half))), special.opaque(int32(low(seed)))
    return uint64(uint64(low(upper)) << half | uint64(low(lower)))


@inlined
def random_words(seed, keys, q_pos, h, b):
    """Four words of 32 bits from one counter."""
    x, y, z, w = low(keys), low(q_pos), low(h), low(b)
    key, other = low(seed), low(uint64(seed) >> uint64(32))
    for _ in range(ROUNDS):
        first, second = bits.multiply_wide(x, MULTIPLIERS[0]), bits.multiply_wide(z, MULTIPLIERS[1])
        x, y = uint32(low(second >> uint64(32)) ^ y ^ key), low(second)
        z, w = uint32(low(first >> uint64(32)) ^ w ^ other), low(first)
        key, other = low(uint64(key) + uint64(WEYL[0])), low(uint64(other) + uint64(WEYL[1]))
    return x, y, z, w


@inlined
def keys_of(k_pos):
    """The index of the group of keys that share a counter with key k_pos."""
    return ((int64(k_pos) >> int64(4)) << int64(1)) | ((int64(k_pos) >> int64(2)) & int64(1))


@inlined
def number_of(words, k_pos):
    """The number of key k_pos in the words of its counter."""
    place = int64(k_pos) & int64(3)
    first, second = (words[0], words[2]) if place & int64(1) == 0 else (words[1], words[3])
    word = uint32(first if place < 2 else second)
    return int32(word >> uint32(16)) if int64(k_pos) & int64(8) != 0 else int32(word & uint32(0xFFFF))


@inlined
def push_lower(dropped, word, most):
    """Shifts a bit into the low end of `dropped`: 1 if the number in the word's lower half drops its weight. most:
    dropout_p * 2^32. The compiler would turn a comparison into a branch."""
    return bits.push_carry(dropped, uint32(word << uint32(16)), most)


@inlined
def push_upper(dropped, word, most):
    """Likewise for the number in the upper half. The word's other bits have no effect, because those of `most` are
    0."""
    return bits.push_carry(dropped, uint32(word), most)


@functools.cache
def make(config):
    """-> factor(at, arrays, sizes, score), a device function: 0 or 1 / (1 - dropout_p), by which a weight is multiplied
    in the output; 1 without dropout."""
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def factor(at, arrays, sizes, score):
        found = compute(1)
        if config.seeded:
            words = random_words(arrays.seed, keys_of(at.k_index), at.q_pos, at.h, at.b)
            counts = number_of(words, at.k_index) < int32(2**16) - sizes.dropped
            found = compute(score.kept_count) if counts else compute(0)
        return found

    return factor


@functools.cache
def on_fragments(config, strips, columns):
    """-> device functions for a tile in a warp's accumulators, in the layout of fragments.py, if `present`. `kept`, the
    dropout mask of `words` words, has a word for each of the lane's rows and a bit for each score, in the order of mask
    bits. columns: of the tile; a warp has `strips` strips of 16 rows."""
    group, blocks, rows, columns_16 = config.group_size, columns // 8, 2 * strips, -(-columns // 16)
    real, words = elements.COMPUTE_TYPES[config.dtype], rows if config.seeded else 1
    assert not config.seeded or columns % 16 == 0 or columns == 8

    # These take 16 columns at a time. Bits are shifted in at the low end, so the last 16 come first.

    @inlined
    def of_16_keys(n, dropped, seed, keys, q_pos, h, b, most):
        """Shifts the bits of one query and the keys of two counters into dropped (2,)."""
        found = random_words(seed, uint64(keys) + uint64(2 * (columns_16 - 1 - n)), q_pos, h, b)
        one, other = dropped[0], dropped[1]
        one = push_upper(push_upper(one, found[1], most), found[0], most)
        dropped[0] = push_lower(push_lower(one, found[1], most), found[0], most)
        other = push_upper(push_upper(other, found[3], most), found[2], most)
        dropped[1] = push_lower(push_lower(other, found[3], most), found[2], most)

    @inlined
    def of_16_queries(n, dropped, seed, keys, q_pos, h, b, most):
        """Shifts the bits of one counter, of keys near and 8 away, into dropped (2,)."""
        found = random_words(seed, keys, uint64(q_pos) + uint64(16 * (columns_16 - 1 - n)), h, b)
        for i in range(4):
            dropped[0] = push_lower(dropped[0], found[3 - i], most)
            dropped[1] = push_upper(dropped[1], found[3 - i], most)

    every_key, every_query = repeated(of_16_keys, columns_16), repeated(of_16_queries, columns_16)

    @inlined
    def of_query_rows(strip, kept, first_key, b, h, first, tile_pos, seed, most):
        """kept <- that of both rows of a strip. Lanes 1 apart share counters: one computes those of the first row, one
        those of the second, for the columns of both."""
        second = (int32(first_key) >> int32(1)) & int32(1)
        row = int32(first + strip * 16 + second * 8)
        query = int32(uint32(row) // uint32(group))
        head, q_pos, dropped = int32(h + row - query * group), low(int64(tile_pos + query)), local.array(2, uint32)
        dropped[0] = dropped[1] = uint32(0)
        every_key(dropped, seed, low(keys_of(first_key)), q_pos, head, b, most)
        mine, handed = (dropped[0], dropped[1]) if second == 0 else (dropped[1], dropped[0])
        came = shfl.bfly_b32(handed, 1)
        if columns == 8:  # the first or the second 8 of 16 keys
            begins = uint32((int32(first_key) >> int32(2)) & int32(2))
            mine, came = uint32(mine >> begins), uint32(came >> begins)
        kept[2 * strip] = ~(mine if second == 0 else came)
        kept[2 * strip + 1] = ~(came if second == 0 else mine)

    @inlined
    def of_key_rows(strip, kept, first_q_pos, b, h, first_key, seed, most):
        """Likewise for a strip's two rows, which are keys.

        Four lanes, 4 and 8 apart, share counters and have the same four queries of every 16. Each computes the counters
        of one query.
        """
        lane_bit, next_bit = int32(first_key) & int32(1), (int32(first_key) >> int32(1)) & int32(1)
        q_pos, dropped = low(int64(first_q_pos + next_bit * 8 + lane_bit)), local.array(2, uint32)
        dropped[0] = dropped[1] = uint32(0)
        every_query(dropped, seed, low(keys_of(first_key + strip * 16)), q_pos, h, b, most)
        near, far = dropped[0], dropped[1]
        near = exchange(exchange(near, lane_bit, 4, 0xAAAAAAAA, 1), next_bit, 8, 0xCCCCCCCC, 2)
        far = exchange(exchange(far, lane_bit, 4, 0xAAAAAAAA, 1), next_bit, 8, 0xCCCCCCCC, 2)
        kept[2 * strip], kept[2 * strip + 1] = ~near, ~far

    every_strip = strips if config.seeded else 0
    every_query_row, every_key_row = repeated(of_query_rows, every_strip), repeated(of_key_rows, every_strip)

    @inlined
    def of_queries(kept, first_key, b, h, first, tile_pos, arrays, sizes):
        """kept of a tile whose rows are queries. Called by a whole warp. first_key: of the lane's first column; first:
        the lane's first row in the query tile, whose first query is at position tile_pos; h: the head of the tile's
        first row."""
        every_query_row(
            kept, first_key, b, h, first, tile_pos, arrays.seed, uint32(uint32(sizes.dropped) << uint32(16))
        )

    @inlined
    def of_keys(kept, first_q_pos, b, h, first_key, arrays, sizes):
        """kept of a tile whose rows are keys. Called by a whole warp. first_q_pos: of the lane's first column;
        first_key: of its first row."""
        every_key_row(
            kept, first_q_pos, b, h, first_key, again(arrays.seed), uint32(uint32(sizes.dropped) << uint32(16))
        )

    @inlined
    def drop(p, kept):
        """p <- 0 where kept has no bit."""
        for r in range(rows):
            for n in range(blocks):
                for i in range(2):
                    if uint32(kept[r] & uint32(1 << (2 * n + i))) == uint32(0):
                        p[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i] = real(0)

    @inlined
    def scale(inverse_l, score):
        """Multiplies what is kept by its factor."""
        for r in range(rows):
            inverse_l[r] *= score.kept_count

    return named(of_queries, of_keys, drop, scale, present=config.seeded, words=words)
