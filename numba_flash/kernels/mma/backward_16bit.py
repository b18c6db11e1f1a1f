"""BackwardProducts in float16 and bfloat16: m16n8k16, and ldmatrix for every operand.

The elements of S and dP that a lane holds are, rounded to 16 bits, those of P and dS that it needs as an operand. Warps
that own the same rows exchange P, and then dS, in one place in shared memory.
"""

from numba import float32, int32, uint32

from ...ptx import bar, cvt, special
from ..steps import fragment_products, gradient_rows
from ..steps.basics import inlined, nothing
from .backward_products import BackwardProducts


def make(config):
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    strips, part = config.warp_rows // 16, config.other_rows // groups
    s_count, dp_count = strips * config.head_dim_padded // 4, strips * config.head_dim_v_padded // 4
    made = fragment_products.make(config)
    load_s, load_dp = made.load_own(config.head_dim_padded), made.load_own(config.head_dim_v_padded)
    weight_count, pack = strips * (part // 8) * 2, cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2

    def multiplier(columns, adds):
        product = made.scores_product(columns)

        @inlined
        def multiply(acc, own_frag, other_frag, own, other):
            if not adds:
                for x in range(2 * weight_count):
                    acc[x] = float32(0)
            own_lane, other_lane, _ = made.lanes(special.thread_index())
            product(acc, own_frag, other_frag, own + own_lane, other + other_lane)

        return multiply

    @inlined
    def load_own_tiles(s_frag, dp_frag, own_s, own_dp):
        own_lane, _, _ = made.lanes(special.thread_index())
        load_s(s_frag, own_s + own_lane)
        load_dp(dp_frag, own_dp + own_lane)

    @inlined
    def round_row(acc, weights, r):
        for n in range(part // 8):
            block = (r // 2) * (part // 8) + n
            weights[block * 2 + r % 2] = pack(acc[block * 4 + (r % 2) * 2], acc[block * 4 + (r % 2) * 2 + 1])

    @inlined
    def sync_owners():
        bar.sync((special.thread_index() >> int32(5 + shift)) + 1, 32 * groups)

    @inlined
    def first_column(thread):
        """The first of the columns of a gradient that a warp sums up."""
        return int32(((thread >> int32(5)) & (groups - 1)) * config.group_columns)

    @inlined
    def own_panels(tile, thread):
        """Where in a tile the lane's rows of those columns begin, for a transposed operand."""
        return tile + int32((first_column(thread) >> 6) * (config.other_rows * 128) + made.lanes(thread)[2])

    def adder(columns):
        product = made.gradient_product(columns)

        @inlined
        def add(sums, weights, other_frag, shared_frag, tile, at):
            if groups == 1:
                _, _, transposed = made.lanes(special.thread_index())
                product(sums, weights, other_frag, tile + transposed)
            else:
                # The thread's number is read again for each product, so that addresses are not kept in registers
                # through the others.
                thread = special.thread_index()
                made.put(weights, at, thread)
                columns_left = columns - first_column(thread)
                made.own_product(sums, weights, other_frag, own_panels(tile, thread), columns_left, thread)
                bar.sync((thread >> int32(5 + shift)) + 1, 32 * groups)
                thread = special.thread_index()
                own_rows, columns_left = at + made.lanes(thread)[0], columns - first_column(thread)
                own_columns = own_panels(tile, thread)
                made.others_product(sums, shared_frag, other_frag, own_rows, own_columns, columns_left, thread)

        return add

    def storer(columns, padded):
        in_order = columns if groups == 1 else config.group_columns
        stage, store = gradient_rows.make(config.dtype, config.own_rows, config.warp_rows, in_order, columns % 8 == 0)

        @inlined
        def store_rows(sums, factor, staged, target, base, row_stride, rows_left, rows_that_count):
            thread = special.thread_index()
            column = first_column(thread)
            lane, first_row = thread & int32(31), int32((thread >> int32(5 + shift)) * config.warp_rows)
            tile, columns_left = staged + (column >> 6) * (config.own_rows * 128), int32(columns - column)
            nonfinite = uint32(0)
            if columns_left > 0:
                nonfinite = stage(sums, factor, tile, first_row, lane, rows_that_count)
                base += column
                store(tile, first_row, lane, target, base, row_stride, rows_left, columns_left, nonfinite)
            return nonfinite

        return store_rows

    return BackwardProducts(
        uint32, s_count, dp_count, 4, weight_count, uint32, 4 * strips, load_own_tiles,
        multiplier(config.head_dim_padded, False), multiplier(config.head_dim_v_padded, config.delta_first),
        round_row, nothing, nothing, adder, sync_owners, storer,
    )  # fmt: skip
