"""What the backward's two kernels in float32 and float64 share: their products, and gradients to global memory.

Read mma/backward_dkdv first. The products are those of the forward (products_float32.py, products_float64.py), with
other tiles in the places of Q, K and V. A warp multiplies its own rows with the rows of a tile that the block walks
over, once for S and once for dP, and then P or dS, which it has in registers, with such a tile.
"""

from typing import NamedTuple

from numba import int32, uint32

from ...ptx import shfl
from ..steps import numbers
from ..steps.inlined import inlined
from ..steps.plain import first_row_of
from . import exchanged_scores, products_float32, products_float64, rows_wide

PRODUCTS = dict(float32=products_float32, float64=products_float64)


class View(NamedTuple):
    """A backward Config as the forward's products look at one: `own` rows are queries there, `other` rows keys."""

    dtype: str
    tile_m: int
    tile_n: int
    warp_rows: int
    head_dim_padded: int  # columns of the first product
    group_columns: int  # and those of the second that a warp sums up
    column_groups: int
    large_f64: bool
    unrolled: bool
    exchange_at: int
    splits_columns: bool = False
    sliced: bool = False
    scalar_loads: bool = False  # these three: products_float64.py
    columns_in_order: bool = False
    odd_rows_first: bool = False


def products(config, first_columns, second_columns):
    """Products of scores over first_columns, and of P or dS with a tile of second_columns."""
    view = View(
        config.dtype,
        config.own_rows,
        config.other_rows,
        config.warp_rows,
        first_columns,
        second_columns // config.column_groups,
        config.column_groups,
        config.large_f64,
        config.unrolled,
        config.shared_layout().exchanged,
    )
    return PRODUCTS[config.dtype].make(view)


def exchange(config):
    """-> Exchange of P, and of dS behind it, between two warps that own the same rows; and bytes of one."""
    view = View(
        config.dtype, config.own_rows, config.other_rows, config.warp_rows, 0, 0, config.column_groups,
        config.large_f64, False, config.shared_layout().exchanged,
    )  # fmt: skip
    return exchanged_scores.make(view), config.own_rows * config.other_rows * config.item_size


def fused_products(config, groups):
    """Of the kernel that computes all gradients, where so many warps share rows: each has a part of the scores, and of
    the columns that are summed up."""
    padded, rows = config.head_dim_padded, (config.tile_n, config.tile_m, config.warp_rows)
    of_warps = groups, config.large_f64, config.unrolled
    loads = dict(scalar_loads=True, columns_in_order=config.columns_in_order, odd_rows_first=True)
    return PRODUCTS[config.dtype].make(View(config.dtype, *rows, padded, padded // groups, *of_warps, 0, **loads))


def dq_product(config):
    """The product of dS with the block's own K: queries are rows, and every warp has a strip of 16."""
    columns, rows = config.dq_columns, (config.tile_m, config.tile_n, 16)
    of_warps = 1, config.large_f64, False
    view = View(config.dtype, *rows, columns, columns, *of_warps, 0, columns_in_order=config.columns_in_order)
    return PRODUCTS[config.dtype].make(view)


def storer(config, columns, padded):
    """-> store_rows, a device function, for a gradient of `columns` columns, of which a warp has `padded` / groups."""
    warp_rows, own_padded = config.warp_rows, padded // config.column_groups
    strips, blocks = warp_rows // 16, own_padded // 8
    real = numbers.of(config.compute_dtype).real
    bfly = numbers.of(config.compute_dtype).bfly
    vectorized = columns * config.item_size % 16 == 0
    write_row = rows_wide.row_writer(config.dtype, blocks, vectorized, config.columns_in_order)

    @inlined
    def scale_row(acc, r, factor, counts):
        """-> whether row r of the lane's is finite; the same in all lanes of a quad."""
        nonfinite = real(0)
        for n in range(blocks):
            for i in range(2):
                at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                acc[at] = acc[at] * factor if counts else real(0)
                nonfinite += acc[at] * real(0)  # NaN when it is NaN or Inf
        nonfinite += bfly(nonfinite, 1)
        nonfinite += bfly(nonfinite, 2)
        return nonfinite == real(0)

    @inlined
    def store_row(r, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        row = int32(first_row_of(lane)) + r * 8
        counts = row < rows_that_count
        finite = scale_row(acc, r, factor, counts)
        if row < rows_left and finite:
            write_row(acc, r, lane, target, base + row * row_stride, 1, columns_left)
        return uint32(0) if finite else uint32(1) << uint32(row)

    def and_row(before, r):
        """Row by row and no loop: LLVM would not write it out, and acc would be indexed."""

        @inlined
        def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
            found = before(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left)
            return found | store_row(
                r, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left
            )

        return store

    @inlined
    def none(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        return uint32(0)

    every_row = none
    for r in range(2 * strips):
        every_row = and_row(every_row, r)

    @inlined
    def store_rows(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left):
        """The warp's rows times factor. base: where its first one begins, at the warp's first column.

        -> a bit for each of its rows that is not finite, and is not stored; the same in all lanes. Rows from
        rows_that_count on, of keys behind the last that is valid, are 0.
        """
        found = every_row(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count, columns_left)
        for distance in (1, 2, 4, 8, 16):
            found |= shfl.bfly_b32(found, distance)
        return found

    return store_rows
