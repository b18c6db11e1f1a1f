"""Writes a warp's rows of a gradient."""

from numba import int32

from ..steps import row_writers
from ..steps.basics import inlined, lane_and_warp


@inlined
def none():
    return int32(0)


def storer(config, columns, padded, first_column=none):
    """-> store, a device function, for a gradient of `columns` columns, of which a warp has its part of `padded`.
    first_column: where the block's begin, if blocks share them."""
    groups, shift, warp_rows = config.column_groups, config.column_groups.bit_length() - 1, config.warp_rows
    blocks, vectorized = config.summed(padded) // 8, columns * config.item_size % 16 == 0
    store_rows = row_writers.of_gradient(config.dtype, warp_rows, blocks, vectorized, config.columns_in_order)

    @inlined
    def store(acc, factor, target, base, row_stride, rows_left, counted):
        """base: where row 0 of the block's begins. Rows from `counted` on are 0. -> a bit for each row of the warp that
        is not finite, and is not written."""
        lane, warp = lane_and_warp()
        column, row = int32(first_column() + (warp & (groups - 1)) * (8 * blocks)), int32((warp >> shift) * warp_rows)
        first, left = base + column + row * row_stride, (int32(rows_left - row), int32(counted - row))
        return store_rows(acc, factor, lane, target, first, row_stride, *left, int32(columns - column))

    return store
