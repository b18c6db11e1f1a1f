"""BackwardProducts in float32 and float64, and those of the kernel that computes all gradients.

The products are those of the forward (products_float32.py, products_float64.py), with
other tiles in the places of Q, K and V. A warp multiplies its own rows with the rows of a tile that the block walks
over, once for S and once for dP, and then P or dS, which it has in registers, with such a tile.
"""

from functools import partial
from typing import NamedTuple

from numba import cuda, int32

from ...ptx import special
from ..steps import numbers, rows_wide
from ..steps.basics import inlined, lane_and_warp, nothing
from . import exchanged_scores, products_float32, products_float64
from .backward_products import BackwardProducts

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
    exchange_at: int = 0
    splits_columns: bool = False
    scalar_loads: bool = False  # these three: products_float64.py
    columns_in_order: bool = False
    odd_rows_first: bool = False


def view_of(config, first_columns, second_columns):
    """For products of scores over first_columns, and of P or dS with a tile of second_columns."""
    rows, of_warp = (config.own_rows, config.other_rows, config.warp_rows), second_columns // config.column_groups
    return View(config.dtype, *rows, first_columns, of_warp, config.column_groups, config.large_f64)


def make(config):
    """-> BackwardProducts. Where warps own the same rows, P and dS each have a place in shared memory for them."""
    groups, strips = config.column_groups, config.warp_rows // 16
    made, columns, columns_v = PRODUCTS[config.dtype], config.head_dim_padded, config.head_dim_v_padded
    of_s = made.make(view_of(config, columns, columns_v))
    of_dp = of_s if columns == columns_v else made.make(view_of(config, columns_v, columns))
    exchange = exchanged_scores.make(view_of(config, 0, 0))

    def multiplier(products):
        @inlined
        def multiply(acc, own_frag, other_frag, own, other):
            own_lane, other_lane, _, _ = products.lanes(*lane_and_warp(), own, other, other)
            products.multiply_part(acc, own_frag, other_frag, own_lane, other_lane)

        return multiply

    @inlined
    def lane_at(at):
        """Where the lane exchanges weights."""
        return exchange.place(*lane_and_warp(), at)

    @inlined
    def to_operand(acc, weights, at):
        if groups > 1:
            exchange.put(acc, lane_at(at))
        else:
            of_s.to_p(acc, weights)

    @inlined
    def meet():
        if groups > 1:
            exchange.meet()

    def adder(columns):
        products = of_s if columns == columns_v else of_dp

        @inlined
        def add(sums, weights, other_frag, shared_frag, tile, at):
            _, _, rows_at, _ = products.lanes(*lane_and_warp(), tile, tile, tile)
            if groups == 1:
                products.multiply_p_v(sums, weights, other_frag, rows_at)
            else:
                place = lane_at(at)
                for _ in range(special.opaque(config.other_rows // 16)):
                    exchange.get_16(shared_frag, place)
                    products.to_16(shared_frag, weights)
                    products.add_16(sums, weights, other_frag, rows_at)
                    place, rows_at = int32(place + exchange.step), int32(rows_at + 2048)

        return add

    @inlined
    def sync_owners():
        cuda.syncthreads()

    weight_count = of_s.p_count if groups == 1 else strips * 8
    real = numbers.of(config.compute_dtype).real
    return BackwardProducts(
        of_s.register, of_s.q_count, of_dp.q_count, of_s.kv_count, weight_count, real, strips * 8, nothing,
        multiplier(of_s), multiplier(of_dp), nothing, to_operand, meet, adder, sync_owners, partial(storer, config),
    )  # fmt: skip


def fused_products(config, groups):
    """Of the kernel that computes all gradients, where so many warps share rows: each has a part of the columns that
    are summed up."""
    padded, rows = config.head_dim_padded, (config.tile_n, config.tile_m, config.warp_rows)
    loads = dict(scalar_loads=True, columns_in_order=True, odd_rows_first=True)
    view = View(config.dtype, *rows, padded, padded // groups, groups, config.large_f64, **loads)
    return products_float64.make(view)


def dq_product(config):
    """The product of dS with the block's own K: queries are rows, and every warp has a strip of 16."""
    sizes = config.tile_m, config.tile_n, 16, config.dq_columns, config.dq_columns
    return products_float64.make(View(config.dtype, *sizes, 1, config.large_f64, columns_in_order=True))


@inlined
def none():
    return int32(0)


def storer(config, columns, padded, first_column=none):
    """-> store, a device function, as of BackwardProducts but without staging, for a gradient of `columns` columns, of
    which a warp has `padded` / groups. first_column: where the block's begin, if blocks share them."""
    groups, shift, warp_rows = config.column_groups, config.column_groups.bit_length() - 1, config.warp_rows
    blocks, vectorized = padded // groups // 8, columns * config.item_size % 16 == 0
    store_rows = rows_wide.gradient_writer(config.dtype, warp_rows, blocks, vectorized, config.columns_in_order)

    @inlined
    def store(acc, factor, staged, target, base, row_stride, rows_left, counted):
        lane, warp = lane_and_warp()
        column, row = int32(first_column() + (warp & (groups - 1)) * (8 * blocks)), int32((warp >> shift) * warp_rows)
        first, left = base + column + row * row_stride, (int32(rows_left - row), int32(counted - row))
        return store_rows(acc, factor, lane, target, first, row_stride, *left, int32(columns - column))

    return store
