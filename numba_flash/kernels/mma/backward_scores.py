"""A lane's scores in a tile of a backward kernel. Rows are of the tile that the block owns, and columns of the t-th
tile that it walks over: keys and queries, or queries and keys.

Where warps share rows, each has a part of the columns. The thread's number is read anew in each function, so that what
follows from it is not kept in registers through the loop.
"""

import functools
from collections import namedtuple

from numba import cuda, int32, uint32

from ...ptx import special
from ..score import fragments, gradient_functions, kept_weights, reads as score_reads, user
from ..score.fragments import columns_within
from ..score.stage import FragmentAt
from ..steps import numbers
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, lane_and_warp, named

# One of the block's own rows: the columns [first, end) that count. If rows are queries, also lse in the scores' unit,
# +inf if the query sees no key, and -delta.
RowState = namedtuple("RowState", "first end lse minus_delta")


@functools.cache
def make(config):
    groups, shift, part = config.column_groups, config.column_groups.bit_length() - 1, config.part
    blocks, of_keys, way = part // 8, config.of_keys, 1 if config.of_keys else -1
    read = score_reads.make(config, config.strips, part, config.of_keys)
    kept_weight = kept_weights.on_fragments(config, config.strips, part)
    of_product, delta_first = config.of_ds and config.of_product, config.delta_first
    apply_functions = gradient_functions.on_fragments(config, config.strips, part, of_keys, of_product)
    has_mask, has_score_mod, has_functions = config.has("mask"), config.has("score_mod"), user.present(config)
    real, (weight, _) = numbers.of(config.compute_dtype).real, fragments.weights_at(config)

    @inlined
    def own_row():
        """The lane's first row."""
        thread = special.thread_index()
        return (thread >> int32(5 + shift)) * config.warp_rows + int32(first_row_of(thread & int32(31)))

    @inlined
    def first_column(t):
        """The lane's first column."""
        thread = special.thread_index()
        column = int32(first_column_of(thread & int32(31))) + ((thread >> int32(5)) & (groups - 1)) * part
        return int32(t * int32(config.other_rows) + column)

    @inlined
    def load(t, origin, registers, arrays, strides, sizes, masked):
        """Loads what the scores need from global memory, while S is computed."""
        lane, warp = lane_and_warp()
        part_t = int32(t * groups + (warp & (groups - 1)))  # index of the warp's part of all columns
        loaded, shown_bits, first_row = registers.loaded, registers.shown_bits, (warp >> shift) * config.warp_rows
        inside = FALSE if masked else TRUE
        read.load(loaded, shown_bits, part_t, origin, first_row, lane, arrays, strides, sizes, inside)

    @inlined
    def find_kept(place, registers, arrays, sizes):
        """kept <- which of the lane's weights count, at its LanePlace."""
        kept, q_pos = registers.kept, place.q_start + place.first_query
        if of_keys:
            kept_weight.of_keys(kept, q_pos, place.b, place.h, place.first_key, arrays, sizes)
        else:
            kept_weight.of_queries(kept, place.first_key, place.b, int32(place.h), int32(0), q_pos, arrays, sizes)

    @inlined
    def find_distances(place, registers):
        """distance <- q_pos - k_pos of the lane's rows at its first column."""
        distance = place.q_start + place.first_query - place.first_key
        for r in range(2 * config.strips):
            registers.distance[r] = real(distance - way * (r * 8))

    @inlined
    def add_delta(r, n, x, registers, minus_delta, score):
        """acc_dp <- -delta before the product, which adds to it; or behind the product, dP times how often its weight
        counts, minus delta. In row r and column 8 * n + x."""
        at, bit = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x, uint32(2 * n + x)
        dp = real(0) if delta_first else registers.acc_dp[at]
        if kept_weight.present:
            dp = dp * score.kept_count if (registers.kept[r] >> bit) & uint32(1) != 0 else real(0)
        registers.acc_dp[at] = minus_delta if delta_first else dp + minus_delta

    @inlined
    def within(t, row):
        """Bits of the lane's columns of tile t that lie in the range of a RowState."""
        column = first_column(t)
        return columns_within(int32(row.first - column), int32(row.end - column), 0)

    @inlined
    def show_seen(r, t, row, registers):
        """shown_bits of row r <- the columns that count, before any function decides."""
        seen = within(t, row)
        registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen

    @inlined
    def apply(place, asks, registers, arrays, strides, score):
        """Applies score_mod and its derivative to acc_s and acc_dp. Drops from shown_bits the scores that
        mask_mod hides. place: a LanePlace; asks: mask_mod decides here."""
        if has_score_mod or asks:
            acc_s, acc_dp, bits = registers.acc_s, registers.acc_dp, registers.shown_bits
            apply_functions(acc_s, acc_dp, bits, place, asks, arrays, strides, score)

    @inlined
    def shown(r, t, row, registers, masked):
        """Bits of the lane's columns that count in row r, by its RowState, a mask and functions. masked, a
        constant: lengths and window leave out some."""
        if has_functions:
            return registers.shown_bits[r]
        if not masked:
            return registers.shown_bits[r] if has_mask else uint32(0)
        return within(t, row) & registers.shown_bits[r] if has_mask else within(t, row)

    @inlined
    def weigh(r, n, x, registers, term, lse, seen, score, masked):
        """acc_s, acc_dp <- P times how often it counts, and dS, in row r and column 8 * n + x. seen: as `shown` returns
        it. -> P, also where it is not seen."""
        at, bit = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + x, uint32(2 * n + x)
        away = cuda.fma(term, real(way * (n * 8 + x)), term * registers.distance[r])
        here = FragmentAt(away, read.added(registers.loaded, r, n, x))
        p, derivative = weight(registers.acc_s[at], here, score, lse)
        found, ds = p, p * registers.acc_dp[at]
        if of_product:
            ds = ds * derivative
        if kept_weight.present:
            p = p * score.kept_count if (registers.kept[r] >> bit) & uint32(1) != 0 else real(0)
        if (masked or has_mask) and (seen >> bit) & uint32(1) == 0:
            p = real(0)
            ds = real(0)  # dP may be NaN there
        registers.acc_s[at] = p
        registers.acc_dp[at] = ds
        return found

    # In float32 and float64 no tile that is seen whole has code of its own, nor has one where functions are called.
    always_masked = has_score_mod or config.item_size > 2
    functions = own_row, first_column, load, find_kept, find_distances, add_delta, show_seen, apply, shown, weigh
    return named(*functions, always_masked=always_masked, read=read, kept_weight=kept_weight)
