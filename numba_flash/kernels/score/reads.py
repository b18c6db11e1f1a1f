"""Loads what each score of a fragment needs from global memory: a bias, and the bits of a mask or of a mask_mod. A bias
in boxes is not read here (kernels/wgmma/bias_boxes.py).

A lane issues all loads of a tile before it waits for the tile's product, so memory and tensor cores work at the same
time. Two neighbouring columns of a bias are one access if they are contiguous (config.bias_pairs). mask_bits.py has
made bits of a mask, in the order in which lanes hold scores: one word for 128 columns of a row.

Rows are queries and columns keys; with of_keys, for the backward's scores of keys, it is the other way around. Rows
past the tile's last one read what the last one reads; columns past the last one are not read.
"""

import functools
from typing import NamedTuple

import numpy as np
from numba import float64, int32, int64, uint32, uint64

from ...arrays.dtypes import ITEM_SIZE
from ...ptx import local, memory, special, vote
from ..steps import elements
from ..steps.basics import first_column_of, first_row_of, inlined, named
from .mask_bits import ENDS, PIECE, SEEN_BY_ALL, SEEN_BY_SOME

MOST = (1 << 31) - 1  # beyond every column


class Origin(NamedTuple):
    """Where a tile's reads begin: the addresses of bias[b, h, 0, 0] and of the mask's bits of (b, h); and the tile's
    first row."""

    bias: int
    bits: int
    first_row: int


@functools.cache
def bits_finder(of_keys):
    """-> bits_of(arrays, strides) -> (the mask's bits, whose rows are keys or queries; their strides)."""

    @inlined
    def bits_of(arrays, strides):
        if of_keys:
            return arrays.mask_bits_of_keys, strides.mask_bits_of_keys
        return arrays.mask_bits, strides.mask_bits

    return bits_of


@functools.cache
def make(config, strips, columns=0, of_keys=False):
    """Tiles of config.tile_n columns, or of `columns`, of which a warp has `strips` strips of 16 rows: device
    functions, and the registers that they fill, bias_words of bias_type and bits_words. `reads`: whether anything is
    read."""
    tile_n, group, rows = columns or config.tile_n, config.group_size, 2 * strips
    blocks, words = tile_n // 8, -(-tile_n // 128)  # words of mask bits for each row
    has_bias, has_bits, dtype = config.has("bias"), config.mask_bits, config.dtype_of("bias") or "float32"
    reads_bias = has_bias and not config.bias_boxes
    item, double, real = ITEM_SIZE[dtype], dtype == "float64", elements.COMPUTE_TYPES[config.dtype]
    pairs = has_bias and not double and config.bias_pairs and not of_keys
    bits_of = bits_finder(of_keys)
    apart, half_of = item > 2, elements.halves(dtype)  # apart: each number has its own register

    @inlined
    def origin(b, h, first_row, arrays, strides):
        bias = bits = int64(0)
        if has_bias:
            bias = memory.address(arrays.bias, b * strides.bias[0] + h * strides.bias[1])
        if has_bits:
            pointer, by = bits_of(arrays, strides)
            bits = memory.address(pointer, b * by[0] + h * by[1])
        return Origin(bias, bits, int32(first_row))

    @inlined
    def place_of(origin, first_row, lane, r, row_count):
        """-> (row of the scores, index of the head in its group) for the lane's row r."""
        row = uint32(first_row + int32(first_row_of(lane)) + r * 8)
        in_head = min(origin.first_row + int32(row // uint32(group)), int32(row_count) - 1)
        return int64(in_head), int64(row % uint32(group))

    @inlined
    def load_pair(loaded, at, place, step, first, second):
        """loaded[at :] <- the bias of two columns, `step` bytes apart. first, second: whether each exists."""
        if double:
            loaded[at] = memory.load_f64_if(place, first)
            loaded[at + 1] = memory.load_f64_if(place + step, second)
        elif pairs and apart:
            memory.load_v2_if(loaded, at, place, first)
        elif pairs:
            loaded[at] = memory.load_b32_if(place, first)
        elif apart:
            loaded[at] = memory.load_b32_if(place, first)
            loaded[at + 1] = memory.load_b32_if(place + step, second)
        else:
            loaded[at] = memory.load_b16_if(place, first) | (memory.load_b16_if(place + step, second) << uint32(16))

    @inlined
    def load_bias(loaded, j, origin, first_row, lane, strides, sizes, inside):
        """loaded <- the bias of the lane's scores of tile j. inside, a constant: all columns exist."""
        if not reads_bias:
            return
        queries, keys = (sizes.seqlen_q, strides.bias[2]), (sizes.seqlen_k, strides.bias[3])
        (row_count, by_row), (column_count, by_column) = (keys, queries) if of_keys else (queries, keys)
        column = int32(first_column_of(lane))
        columns_left = int32(column_count - int64(j) * tile_n) - column
        # A constant if it is one, so that addresses of a row also differ by constants.
        step = int64(item) if pairs else by_column * item
        for r in range(rows):
            row, member = place_of(origin, first_row, lane, r, row_count)
            place = origin.bias + item * (row * by_row + member * strides.bias[1]) + (int64(j) * tile_n + column) * step
            for n in range(blocks):
                first = uint32(1) if inside or n * 8 < columns_left else uint32(0)
                second = uint32(1) if inside or n * 8 + 1 < columns_left else uint32(0)
                load_pair(loaded, (r * blocks + n) * (2 if apart else 1), place + 8 * n * step, step, first, second)

    @inlined
    def load_bits(bits, j, origin, first_row, lane, arrays, strides, sizes):
        """bits <- which of the lane's scores the mask leaves."""
        if not has_bits:
            return
        _, by = bits_of(arrays, strides)
        row_count, row_words = sizes.seqlen_k if of_keys else sizes.seqlen_q, by[3]
        first_bit = int32(j * (tile_n // 4))  # a lane has two of eight columns
        first_word, shift = first_bit >> 5, uint32(first_bit & 31)
        words_left = int32(row_words >> 2) - first_word
        for r in range(rows):
            row, member = place_of(origin, first_row, lane, r, row_count)
            word = (row >> 4) * by[2] + ENDS + (row & (PIECE - 1)) * row_words + member * by[1]
            place = origin.bits + 4 * (word + 4 * int64(first_word) + (lane & 3))
            for n in range(words):
                found = memory.load_b32_if(place + 16 * n, uint32(1) if n < words_left else uint32(0))
                if tile_n % 128 and 128 % tile_n:  # a tile's bits may begin in one word and end in the next
                    following = memory.load_b32_if(place + 16 * n + 16, uint32(1) if n + 1 < words_left else uint32(0))
                    found = uint32((uint64(following) << uint64(32) | uint64(found)) >> uint64(shift))
                elif tile_n % 128:
                    found = found >> shift
                bits[r * words + n] = found

    @inlined
    def load(loaded, bits, j, origin, first_row, lane, arrays, strides, sizes, inside):
        """Loads both; inside: as of load_bias."""
        load_bias(loaded, j, origin, first_row, lane, strides, sizes, inside)
        load_bits(bits, j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def added(loaded, r, n, i):
        """The bias of the lane's row r and its column n * 8 + i."""
        found = real(0)
        if has_bias:
            if double:
                found = loaded[(r * blocks + n) * 2 + i]
            elif apart:
                found = real(loaded[(r * blocks + n) * 2 + i].view(np.float32))
            else:
                found = half_of(loaded[r * blocks + n], i)
        return found

    @inlined
    def hide(mask_bits, bits, masked):
        """Drops from mask_bits the scores that the mask hides. masked, a constant: without it all of the tile is seen
        so far."""
        if has_bits:
            for i in range(rows * words):
                mask_bits[i] = mask_bits[i] & bits[i] if masked else bits[i]

    @inlined
    def some_hidden(mask_bits):
        """Whether the mask hides any of the warp's scores: almost never in most tiles."""
        some = uint32(0)
        for i in range(rows * words):
            count = min(2 * blocks - 32 * (i % words), 32)
            some |= ~mask_bits[i] & uint32((1 << count) - 1)
        return vote.any_lane(some) != 0

    @inlined
    def ranges(b, h, heads, first_row, end_row, arrays, strides, sizes):
        """-> (first, end, first, end) over all pieces that hold these rows, of `heads` heads from h on. Only columns of
        the first range are shown in any of the rows; all columns of the second are shown in all of them. In 32 bits,
        because wgmma's scheduler, the caller, has few registers."""
        four = local.array(4, uint32)
        bits, by = bits_of(arrays, strides)
        first, end, whole_first, whole_end = int32(MOST), int32(0), int32(0), int32(MOST)
        piece = int32(first_row) >> 4
        pieces = int32(((int32(end_row) - 1) >> 4) - piece + 1) if by[2] != 0 else int32(1)
        heads_left = int32(heads) if by[1] != 0 else int32(1)
        of_head = b * by[0] + h * by[1] + piece * by[2]
        while heads_left > 0:
            place, left = of_head, pieces
            while left > 0:
                memory.load_v4(four, 0, memory.address(bits, place))
                first, end = min(first, int32(four[SEEN_BY_SOME])), max(end, int32(four[SEEN_BY_SOME + 1]))
                whole_first = max(whole_first, int32(four[SEEN_BY_ALL]))
                whole_end = min(whole_end, int32(four[SEEN_BY_ALL + 1]))
                place, left = place + by[2], special.opaque(int32(left - 1))
            of_head, heads_left = of_head + by[1], int32(heads_left - 1)
        return first, end, whole_first, whole_end

    bias_words, bits_words = rows * blocks * (2 if apart else 1) if has_bias else 1, rows * words if has_bits else 1
    counts = dict(bias_words=bias_words, bits_words=bits_words, bias_type=float64 if double else uint32)
    functions = origin, load, load_bias, load_bits, added, hide, some_hidden, ranges
    reads, narrow = reads_bias or has_bits, ITEM_SIZE[config.dtype] == 2
    # Before a tile's products, or behind them if these take all registers.
    return named(*functions, **counts, reads=reads, before=reads and narrow, behind=reads and not narrow)


@functools.cache
def one_by_one(config, of_keys=False):
    """The same for one score: device functions `added`, the bias or 0, and `visible`, whether the mask leaves the key,
    by its bits. of_keys: the mask's bits have keys as rows."""
    has_bias, has_bits = config.has("bias"), config.mask_bits
    bits_of, real = bits_finder(of_keys), elements.COMPUTE_TYPES[config.dtype]
    load_bias = elements.loader(config.dtype_of("bias") or "float32", real)

    @inlined
    def added(b, h, query, key, arrays, strides):
        found = real(0)
        if has_bias:
            row = b * strides.bias[0] + h * strides.bias[1] + query * strides.bias[2]
            found = load_bias(arrays.bias, row + key * strides.bias[3])
        return found

    @inlined
    def visible(b, h, query, key, arrays, strides):
        found = True
        if has_bits:
            bits, by = bits_of(arrays, strides)
            row, column = (key, query) if of_keys else (query, key)
            first = b * by[0] + h * by[1] + (row >> 4) * by[2] + ENDS + (row & (PIECE - 1)) * by[3]
            word = bits[first + (int64(column) >> 7) * 4 + ((column >> 1) & 3)]
            found = (word >> uint32(2 * ((column >> 3) & 15) + (column & 1))) & uint32(1) != 0
        return found

    return named(added, visible)
