"""Rows of O or of a gradient from a warp's accumulators to global memory.

In 16 bits a lane has two neighbouring columns of each block of 8. The four lanes of a quad exchange them until each has
16 contiguous bytes. In 32 and 64 bits with columns in order a lane has the same columns, so four lanes write 32 or 64
bytes that lie together. Otherwise it has 32 bytes of each panel of its rows; kernels/mma/products_float32.py says which
columns those are.
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import cvt, local, memory, shfl
from . import elements, numbers
from .basics import first_column_of, first_row_of, inlined
from .repeated import repeated


def writer(dtype, blocks, vectorized, columns_in_order=True, every_row=False):
    """-> write, a device function, for rows of `blocks` times 8 columns. vectorized: columns are neighbours, and rows
    begin and end at multiples of what the lane writes at a time: 16 bytes, or in float32 two columns in order.
    every_row: in 16 bits, also those that are not finite."""
    if dtype in ("float16", "bfloat16"):
        return _in_16_bits(dtype, blocks, vectorized, every_row)
    scale_row = _row_scaler(dtype, blocks)
    write_row = _row_writer(dtype, blocks, vectorized, columns_in_order)

    @inlined
    def write(acc, r, factor, counts, lane, exists, target, row_at, column_stride, columns_left):
        """Stores the lane's row r, times factor or 0 if it does not count, in the row that begins at element row_at of
        target, if that exists and all of it is finite. -> whether it is; the same in all lanes of a quad."""
        finite = scale_row(acc, r, factor, counts)
        if finite and exists:
            write_row(acc, r, lane, target, row_at, column_stride, columns_left)
        return finite

    return write


def _in_16_bits(dtype, blocks, vectorized, every_row):
    words_of_row = (blocks + 3) // 4 * 4  # one for each block
    pack = cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def pair_of(acc, r, factor, counts, n):
        """A lane's two elements of block n of 8 columns, in 16 bits; zero past the last block."""
        at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
        return pack(acc[at] * factor, acc[at + 1] * factor) if n < blocks and counts else uint32(0)

    @inlined
    def exchange(words, x, distance, keeps_second):
        """A lane keeps one of words x and x + distance. It gives the other to the lane `distance` away."""
        mine, given = words[x], words[x + distance]
        if keeps_second:
            mine, given = given, mine
        given = shfl.bfly_b32(given, distance)
        words[x] = given if keeps_second else mine
        words[x + distance] = mine if keeps_second else given

    @inlined
    def exchange_blocks(words, lane):
        """For n = 0, 4, ... lane i of a quad gives its words of block n + j to lane j and gets the others' words of
        block n + i. Then it has 16 contiguous bytes."""
        for n in range(0, words_of_row, 4):
            for i in range(2):
                exchange(words, n + i, 2, lane & 2)
        for n in range(0, words_of_row, 4):
            for i in range(0, 4, 2):
                exchange(words, n + i, 1, lane & 1)

    @inlined
    def is_finite(acc, r):
        even, odd = float32(0), float32(0)
        for n in range(blocks):
            at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
            even += acc[at] * float32(0)  # NaN when it is NaN or Inf
            odd += acc[at + 1] * float32(0)
        nonfinite = even + odd
        nonfinite += shfl.bfly_f32(nonfinite, 1)
        nonfinite += shfl.bfly_f32(nonfinite, 2)
        return nonfinite == 0

    @inlined
    def write(acc, r, factor, counts, lane, exists, target, row_at, column_stride, columns_left):
        """The same."""
        words, finite = local.array(words_of_row, uint32), is_finite(acc, r) or not counts
        here = exists and (finite or every_row)
        if vectorized:
            for n in range(words_of_row):
                words[n] = pair_of(acc, r, factor, counts, n)
            exchange_blocks(words, lane)
            to = memory.address(target, row_at) + int64((lane & 3) * 16)
            for n in range(0, words_of_row, 4):
                if here and 8 * (n + (lane & 3)) + 8 <= columns_left:
                    memory.store_v4(to + 16 * n, words, n)
        else:
            for n in range(blocks):
                two = pair_of(acc, r, factor, counts, n)
                for i in range(2):
                    column = int32(first_column_of(lane)) + 8 * n + i
                    if here and column < columns_left:
                        half = uint32(two >> uint32(16)) if i else two
                        memory.store_b16(memory.address(target, row_at + column * column_stride), half)
        return finite

    return write


def _row_writer(dtype, blocks, vectorized, columns_in_order):
    """-> write_row, a device function."""
    double, item_size = dtype == "float64", 8 if dtype == "float64" else 4
    # Elements that are written at a time; a panel has 8 times as many, and as many blocks as these.
    chunk = 2 if columns_in_order else 4
    halves, step = (1, 2) if columns_in_order else (2, 2 * chunk)  # of a panel; from a lane's columns to the next one's
    store, real = elements.storer(dtype), numbers.of(dtype).real

    @inlined
    def store_chunk(values, to):
        if double:
            memory.store_v2_f64(to, values, 0)
        else:
            words = local.array(chunk, uint32)
            for j in range(chunk):
                words[j] = values[j].view(np.uint32)
            if columns_in_order:
                memory.store_v2(to, words, 0)
            else:
                memory.store_v4(to, words, 0)

    @inlined
    def write_row(acc, r, lane, target, row_at, column_stride, columns_left):
        values = local.array(chunk, real)
        first_column = int32((lane & 3) * step)
        to = memory.address(target, row_at + first_column * column_stride)
        for panel in range(blocks // (chunk if halves == 2 else 1)):
            for half in range(halves):
                ahead = 8 * panel if columns_in_order else (8 * panel + half) * chunk
                for j in range(chunk):
                    block, i = (panel, j) if columns_in_order else (panel * chunk + j, half)
                    values[j] = acc[((r // 2) * blocks + block) * 4 + (r % 2) * 2 + i]
                column = int32(first_column + ahead)
                if vectorized:
                    if column < columns_left:
                        store_chunk(values, to + item_size * ahead)
                else:
                    for j in range(chunk):
                        if int32(column + j) < columns_left:
                            store(target, row_at + int32(column + j) * column_stride, values[j])

    return write_row


def _row_scaler(dtype, blocks):
    """-> scale_row, a device function: row r of the lane's times factor, or 0 where it does not count. -> whether it is
    finite; the same in all lanes of a quad."""
    real, bfly = (made := numbers.of(dtype)).real, made.bfly

    @inlined
    def scale_row(acc, r, factor, counts):
        even, odd = real(0), real(0)
        for n in range(blocks):
            at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
            for i in range(2):
                acc[at + i] = acc[at + i] * factor if counts else real(0)
            even += acc[at] * real(0)  # NaN when it is NaN or Inf
            odd += acc[at + 1] * real(0)
        nonfinite = even + odd
        nonfinite += bfly(nonfinite, 1)
        nonfinite += bfly(nonfinite, 2)
        return nonfinite == real(0)

    return scale_row


@inlined
def of_warp(nonfinite):
    """Bits of a lane's rows -> those of the warp's, in all lanes. Lanes of a quad have the same rows."""
    for distance in (4, 8, 16):
        nonfinite |= shfl.bfly_b32(nonfinite, distance)
    return nonfinite


def of_gradient(dtype, warp_rows, blocks, vectorized, columns_in_order=True, every_row=False):
    """-> store, a device function, for a gradient of which a warp has warp_rows rows of `blocks` times 8 columns."""
    write = writer(dtype, blocks, vectorized, columns_in_order, every_row)

    @inlined
    def store_row(r, found, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        row = int32(first_row_of(lane)) + r * 8
        at, counts, exists = base + row * row_stride, row < rows_that_count, row < rows_left
        if not write(acc, r, factor, counts, lane, exists, target, at, 1, columns_left):
            found[0] |= uint32(1) << uint32(row)

    store_every_row = repeated(store_row, warp_rows // 8)

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        """Writes factor times the warp's rows, and zeros from row rows_that_count on. The first row begins at element
        `base`; rows_left and columns_left exist from there on.

        -> a bit for each row that is not finite and so, without every_row, is not stored; the same in all lanes.
        """
        found = local.array(1, uint32)
        found[0] = uint32(0)
        store_every_row(found, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left)
        return of_warp(found[0])

    return store
