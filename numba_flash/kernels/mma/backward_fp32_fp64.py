"""The products of backward.py in float32 and float64.

They are those of the forward (products_float32.py, products_float64.py), with other tiles in the places of Q, K and V.
A warp multiplies its own rows with the rows of a tile that the block walks over, once for S and once for dP, and then P
or dS, which it has in registers, with such a tile.
"""

from typing import NamedTuple

from numba import cuda, int32

from ...ptx import special
from ..steps import numbers
from ..steps.basics import inlined, lane_and_warp, named, nothing
from . import exchanged_scores, products_float32, products_float64

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
    unrolled: bool = False  # this and the next: products_float64.py
    odd_rows_first: bool = False


def make(config):
    """-> the functions and registers of backward_16bit.py. Where warps own the same rows, P and dS each have a place in
    shared memory for them."""
    groups, columns, columns_v = config.column_groups, config.head_dim_padded, config.head_dim_v_padded
    rows = config.own_rows, config.other_rows, config.warp_rows

    def view(first, second):
        """The View of score products over `first` columns, and of P or dS times a tile of `second` columns."""
        return View(config.dtype, *rows, first, second // groups, groups, config.large_f64)

    of_s = PRODUCTS[config.dtype].make(view(columns, columns_v))
    of_dp = of_s if columns == columns_v else PRODUCTS[config.dtype].make(view(columns_v, columns))
    exchange = exchanged_scores.make(view(columns, columns_v))

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

    return named(
        to_operand, meet, adder, sync_owners,
        load_own=nothing,
        multiply_s=multiplier(of_s),
        multiply_dp=multiplier(of_dp),
        round_row=nothing,
        register=of_s.register,
        s_count=of_s.q_count,
        dp_count=of_dp.q_count,
        other_count=of_s.kv_count,
        weight_count=of_s.p_count if groups == 1 else config.strips * 8,
        shared_type=numbers.of(config.compute_dtype).real,
        shared_count=config.strips * 8,
    )  # fmt: skip
