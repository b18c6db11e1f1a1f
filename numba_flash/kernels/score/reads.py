"""What the scores of a fragment need from global memory, for each of them: bias, and the bits of a mask.

A lane asks for all of a tile before the product of the tile is waited for, so that memory and tensor cores work at the
same time. Two neighbouring columns of a bias are one access where they lie side by side (config.bias_pairs). Of a mask
there are the bits that mask_bits.py made of it, in the order in which lanes hold scores: for 128 columns of a row a
word.

Rows of the query tile past the last query read what the last one has; what lies past the last key is not read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32, uint64

from ...config.forward import ITEM_SIZE
from ...ptx import cvt, memory, vote
from ..steps.inlined import inlined
from ..steps.plain import first_column_of, first_row_of
from .mask_bits import ENDS, PIECE


class Origin(NamedTuple):
    """Where all that a query tile reads begins: the addresses of bias[b, h, 0, 0] and of the mask's bits of (b, h)."""

    bias: int
    bits: int
    first_query: int


class Reads(NamedTuple):
    """Device functions, and how many registers they fill. A lane has 2 * strips rows."""

    reads: bool  # whether anything is read at all
    bias_words: int
    bits_words: int
    origin: Callable[..., Any]  # (b, h, first_query, arrays, strides) -> Origin
    load: Callable[..., Any]
    added: Callable[..., Any]
    hide: Callable[..., Any]
    some_hidden: Callable[..., Any]
    ends: Callable[..., Any]


@functools.cache
def make(config: Any, strips: int, columns: int = 0) -> Reads:
    """Of tiles of config.tile_n columns, or of `columns`, of which a warp has `strips` strips of 16 rows."""
    tile_n, group, rows = columns or config.tile_n, config.group, 2 * strips
    blocks = tile_n // 8
    words = -(-blocks // 16)  # of mask bits for a row
    has_bias, has_mask = config.has("bias"), config.has("mask")
    dtype = config.dtype_of("bias") or "float32"
    item, pairs = ITEM_SIZE[dtype], has_bias and config.bias_pairs
    wide, half = item == 4, dtype == "float16"
    load_b16, load_b32, load_v2 = memory.load_b16_if, memory.load_b32_if, memory.load_v2_if
    low_f16, high_f16, any_lane, address = cvt.low_f16, cvt.high_f16, vote.any_lane, memory.address

    @inlined
    def origin(b, h, first_query, arrays, strides):
        bias = bits = int64(0)
        if has_bias:
            bias = address(arrays.bias, b * strides.bias[0] + h * strides.bias[1])
        if has_mask:
            bits = address(arrays.mask_bits, b * strides.mask_bits[0] + h * strides.mask_bits[1])
        return Origin(bias, bits, int32(first_query))

    @inlined
    def place_of(origin, first_row, lane, r, sizes):
        """-> (query, which head of the group) of the lane's row r."""
        row = uint32(first_row + int32(first_row_of(lane)) + r * 8)
        return int64(min(origin.first_query + int32(row // uint32(group)), int32(sizes.seqlen_q) - 1)), int64(
            row % uint32(group)
        )

    @inlined
    def load_pair(loaded, at, place, step, first, second):
        """loaded[at :] <- the bias of two columns, `step` bytes apart, of which the second is there if `second` is."""
        if pairs and wide:
            load_v2(loaded, at, place, first)
        elif pairs:
            loaded[at] = load_b32(place, first)
        elif wide:
            loaded[at] = load_b32(place, first)
            loaded[at + 1] = load_b32(place + step, second)
        else:
            loaded[at] = load_b16(place, first) | (load_b16(place + step, second) << uint32(16))

    @inlined
    def load_bias(loaded, j, origin, first_row, lane, strides, sizes, inside):
        column = int32(first_column_of(lane))
        keys_left = int32(sizes.seqlen_k - int64(j) * tile_n) - column
        # As a constant where it is one, so that addresses of a row differ by constants too.
        step = int64(item) if pairs else strides.bias[3] * item
        for r in range(rows):
            query, member = place_of(origin, first_row, lane, r, sizes)
            place = (
                origin.bias
                + item * (query * strides.bias[2] + member * strides.bias[1])
                + (int64(j) * tile_n + column) * step
            )
            for n in range(blocks):
                first = uint32(1) if inside or n * 8 < keys_left else uint32(0)
                second = uint32(1) if inside or n * 8 + 1 < keys_left else uint32(0)
                load_pair(loaded, (r * blocks + n) * (2 if wide else 1), place + 8 * n * step, step, first, second)

    @inlined
    def load_bits(bits, j, origin, first_row, lane, strides, sizes):
        row_words = strides.mask_bits[3]
        first_bit = int32(j * (tile_n // 4))  # a lane has two of eight columns
        first_word, shift = first_bit >> 5, uint32(first_bit & 31)
        words_left = int32(row_words >> 2) - first_word
        for r in range(rows):
            query, member = place_of(origin, first_row, lane, r, sizes)
            word = (query >> 4) * strides.mask_bits[2] + (query & 15) * row_words + member * strides.mask_bits[1]
            place = origin.bits + 4 * (word + 4 * int64(first_word) + (lane & 3))
            for n in range(words):
                found = load_b32(place + 16 * n, uint32(1) if n < words_left else uint32(0))
                if tile_n % 128 and 128 % tile_n:  # it may begin in one word and end in the next
                    following = load_b32(place + 16 * n + 16, uint32(1) if n + 1 < words_left else uint32(0))
                    found = uint32((uint64(following) << uint64(32) | uint64(found)) >> uint64(shift))
                elif tile_n % 128:
                    found = found >> shift
                bits[r * words + n] = found

    @inlined
    def load(loaded, bits, j, origin, first_row, lane, strides, sizes, inside):
        """loaded, bits <- what the lane's scores of tile j need. inside, a constant: no column lies past the last."""
        if has_bias:
            load_bias(loaded, j, origin, first_row, lane, strides, sizes, inside)
        if has_mask:
            load_bits(bits, j, origin, first_row, lane, strides, sizes)

    @inlined
    def added(loaded, r, n, i):
        """The bias of the lane's row r and its column n * 8 + i."""
        found = float32(0)
        if has_bias:
            if wide:
                found = loaded[(r * blocks + n) * 2 + i].view(np.float32)
            elif half:
                found = high_f16(loaded[r * blocks + n]) if i else low_f16(loaded[r * blocks + n])
            else:
                two = loaded[r * blocks + n]
                found = uint32(two & uint32(0xFFFF0000) if i else two << uint32(16)).view(np.float32)
        return found

    @inlined
    def hide(mask_bits, bits, masked):
        """mask_bits <- without those that the mask hides. masked, a constant: else all of the tile are seen so far."""
        if has_mask:
            for i in range(rows * words):
                mask_bits[i] = mask_bits[i] & bits[i] if masked else bits[i]

    @inlined
    def some_hidden(mask_bits):
        """Whether the mask hides any of the warp's scores: nearly never in most tiles."""
        some = uint32(0)
        for i in range(rows * words):
            count = min(2 * blocks - 32 * (i % words), 32)
            some |= ~mask_bits[i] & uint32((1 << count) - 1)
        return any_lane(some) != 0

    @inlined
    def ends(b, h, first_query, end_query, arrays, strides, sizes):
        """-> [first, end), beyond which the mask shows none of these queries of the heads from h on a key."""
        first, end = int32(sizes.seqlen_k), int32(0)
        piece, last_piece = int64(first_query) >> 4, (int64(end_query) - 1) >> 4
        if strides.mask_bits[2] == 0:
            last_piece = piece
        members = group if strides.mask_bits[1] != 0 else 1
        for member in range(members):
            base = b * strides.mask_bits[0] + (h + member) * strides.mask_bits[1] + PIECE * strides.mask_bits[3]
            for p in range(piece, last_piece + 1):
                at = base + p * strides.mask_bits[2]
                first = min(first, int32(arrays.mask_bits[at]))
                end = max(end, int32(arrays.mask_bits[at + 1]))
        return first, end

    bias_words = rows * blocks * (2 if wide else 1) if has_bias else 1
    assert ENDS >= 2
    return Reads(
        has_bias or has_mask, bias_words, rows * words if has_mask else 1, origin, load, added, hide, some_hidden, ends
    )
