"""Rows of O or of a gradient in 32 or 64 bits, from a warp's accumulators to global memory.

In order, a lane has two neighbouring columns of each block of 8: so four lanes write 32 or 64 bytes that lie together.
Otherwise it has 32 bytes of each panel of its rows; kernels/mma/products_float32.py says which columns those are.
"""

import numpy as np
from numba import int32, uint32

from ...ptx import local, memory, shfl
from . import elements, numbers
from .basics import first_row_of, inlined
from .repeated import repeated


def row_writer(dtype, blocks, vectorized, columns_in_order=False):
    """-> write_row, a device function, for rows of `blocks` times 8 columns. vectorized: columns are neighbours, and
    rows begin and end at multiples of what the lane writes at a time: 16 bytes, or in float32 two columns in order."""
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
        """Stores the lane's row r in the row that begins at element row_at of target."""
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


def row_scaler(compute_dtype, blocks):
    """-> scale_row(acc, r, factor, counts), a device function: row r of the lane's times factor, or 0 where it does not
    count. -> whether it is finite; the same in all lanes of a quad."""
    real, bfly = (made := numbers.of(compute_dtype)).real, made.bfly

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


def gradient_writer(dtype, warp_rows, blocks, vectorized, columns_in_order=True):
    """-> store, a device function, for a gradient of which a warp has warp_rows rows of `blocks` times 8 columns."""
    scale_row = row_scaler(dtype, blocks)
    write_row = row_writer(dtype, blocks, vectorized, columns_in_order)

    @inlined
    def store_row(r, found, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        row = int32(first_row_of(lane)) + r * 8
        if not scale_row(acc, r, factor, row < rows_that_count):
            found[0] |= uint32(1) << uint32(row)
        elif row < rows_left:
            write_row(acc, r, lane, target, base + row * row_stride, 1, columns_left)

    store_every_row = repeated(store_row, warp_rows // 8)

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        """Writes factor times the warp's rows, and zeros from row rows_that_count on. The first row begins at element
        `base`; rows_left and columns_left exist from there on.

        -> a bit for each row that is not finite and so is not stored; the same in all lanes.
        """
        found = local.array(1, uint32)
        found[0] = uint32(0)
        store_every_row(found, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left)
        bits = found[0]
        for distance in (1, 2, 4, 8, 16):
            bits |= shfl.bfly_b32(bits, distance)
        return bits

    return store
