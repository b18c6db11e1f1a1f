"""Writes rows of a float32 gradient from wgmma's accumulators straight to global memory."""

import functools

import numpy as np
from numba import float32, int32, uint32

from ...ptx import cluster, shfl
from ..steps.inlined import inlined
from ..steps.plain import first_row_of
from . import rows_float32

FIRST, SECOND = (np.int32(i) for i in range(2))  # not Python ints: see inlined.py


@functools.cache
def make(columns, padded, of_row=None):
    """-> store, a device function, for a gradient of `columns` columns. A lane has its sums as (padded / 8, 4).

    of_row: number of columns of a whole row, if these are only a part.
    """
    blocks = padded // 8
    write_row = rows_float32.row_writer(blocks, columns, (of_row or columns) % 2 == 0)

    @inlined
    def store_row(r, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        row = int32(first_row_of(lane)) + 8 * r
        counts, nonfinite = row < rows_that_count, float32(0)
        for n in range(blocks):
            for x in range(2):
                at = 4 * n + 2 * r + x
                acc[at] = acc[at] * factor if counts else float32(0)
                nonfinite += acc[at] * float32(0)  # NaN when it is NaN or Inf
        nonfinite += shfl.bfly_f32(nonfinite, 1)
        nonfinite += shfl.bfly_f32(nonfinite, 2)
        finite = nonfinite == float32(0)
        if finite and row < rows_left:
            write_row(acc, r, lane, target, base + row * row_stride, 1)
        return uint32(0) if finite else uint32(1) << uint32(row)

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        """Writes factor times a warp's 16 rows, and zeros from row rows_that_count on. The first row begins at element
        `base`.

        -> a bit for each row that is not finite and so is not stored; the same in all lanes.
        """
        found = store_row(FIRST, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        found |= store_row(SECOND, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        for distance in (1, 2, 4, 8, 16):
            found |= shfl.bfly_b32(found, distance)
        return found

    return store


@functools.cache
def of_block(config, head_dim, padded):
    """-> store, as above, for the columns of a gradient of head_dim that a block has: all, or half of them in a pair.

    padded: of the first block's half; base: of the whole row.
    """
    if not config.paired:
        return make(head_dim, padded)
    second = max(head_dim - padded, 0)
    store_first, store_second = make(min(padded, head_dim), padded, head_dim), make(second, padded, head_dim)
    same = second == padded

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        rank = cluster.rank()
        base += rank * padded
        if same or rank == 0:
            found = store_first(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        else:
            found = store_second(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        return found

    return store
