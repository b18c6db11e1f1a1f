"""Rows of O that came out NaN or Inf, computed again from the beginning without the keys that they do not see
(pairs.py).

In 16 bits a row's lse is right whatever V is, and stays as it is. In float32 an Inf in K or Q also makes NaN
(kernels/mma/products_float32.py), and so does a number that tf32 rounds up to Inf: there lse is written again.

A sum of weights times large numbers of V may be Inf before it is divided by l. Here all weights of a row are scaled
down by a power of 2, so that l is at most 1. Then no sum is larger than the largest number of V.
"""

import math
from typing import Any

from numba import int32, int64, uint32

from ...ptx import ld_st, local
from ..score import at_key, fragments, kept_weights, sum_term
from ..steps import numbers, pages
from ..steps.basics import inlined
from ..steps.sequence import key_row, kv_head, lse_row, make as make_sequence, query_of, query_row
from ..steps.units import exponent_unit
from . import pairs


def _of_row(config: Any, row_of_v: Any, row_of_key: Any = pairs.own_row) -> Any:
    """-> recompute_row, a device function. row_of_v: (of_v, key, arrays, strides, sizes) -> where the columns of a row
    of V begin; of_v: what a caller of recompute_row says of all rows. row_of_key: as of pairs.make."""
    made, of_pair = numbers.of(config.compute_dtype), pairs.make(config, row_of_key=row_of_key)
    first_m_and_l, exponential = sum_term.start(config), fragments.exponential_of(config)
    unit, ln_2, weight_factor = made.real(exponent_unit(config)), made.real(math.log(2)), kept_weights.make(config)
    words = -(-config.group_columns // 32)

    @inlined
    def recompute_row(row_o, sequence, query, lane, first_column, columns, of_v, arrays, strides, sizes, score):
        """Writes `columns` columns of O of a Query. row_o: registers for them. -> its lse in natural units."""
        first_key, end_key = query.first_key, query.end_key
        largest = made.real(1)  # an upper bound of a weight, a power of 2
        while largest * made.real(end_key - first_key + 1) > made.real(1):  # a sink is one more term
            largest *= made.real(0.5)
        m, l = first_m_and_l(query.b, query.h, arrays, strides)
        m, l = m * unit, l * largest
        of_pair.clear(row_o, config.group_columns)
        for key in range(first_key, end_key):
            s = of_pair.score(sequence, query.h, query.q_index, key, lane, arrays, strides, sizes, score)
            if s > m:
                alpha = exponential(m - s)
                l *= alpha
                for word in range(words):
                    row_o[word] *= alpha
                m = s
            if s != made.minus_inf:
                p = exponential(s - m) * largest
                l += p
                p *= weight_factor(at_key(query, key), arrays, sizes, score)
                of_pair.add(row_o, p, arrays.v, row_of_v(of_v, key, arrays, strides, sizes), columns, lane)
        if m == -made.minus_inf:  # a sink of Inf, or a score
            l = made.real(math.nan)
        row_lse = made.minus_inf if l == made.real(0) else m / unit + made.log2(l / largest) * ln_2
        inverse = made.real(0) if l == made.real(0) else made.real(1) / l
        at = query_row(strides.o, sequence, query.h, query.q_index) + first_column * strides.o[3]
        of_pair.store(row_o, inverse, arrays.o, at, strides.o[3], columns, lane)
        return row_lse

    return recompute_row


def make(config: Any, warp_rows: int) -> Any:
    """-> recompute_rows, a device function."""

    @inlined
    def row_of_v(first_v, key, arrays, strides, sizes):
        return first_v + key * strides.v[2]

    recompute_row, real = _of_row(config, row_of_v), numbers.of(config.compute_dtype).real
    sequence_of, words = make_sequence(config), -(-config.group_columns // 32)
    write_lse = config.write_lse and config.item_size > 2

    @inlined
    def recompute_rows(nonfinite, first_row, lane, tile, arrays, strides, sizes, score):
        """One warp computes those of its rows from first_row on that have a bit in nonfinite, of a QueryTile."""
        sequence, h_kv = sequence_of(tile.b, arrays, strides, sizes), kv_head(tile.h, sizes)
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.queries))
        first_column = tile.part * config.group_columns
        columns = int32(min(config.head_dim_v - first_column, config.group_columns))
        first_v = key_row(strides.v, sequence, h_kv, 0) + first_column
        row_o = local.array(words, real)
        for row in range(first_row, first_row + warp_rows):
            row_query, head = row // config.group_size, tile.h + row % config.group_size
            if row_query < queries_left and (nonfinite >> uint32(row - first_row)) & uint32(1) != 0:
                query = query_of(sequence, head, tile.first_query + row_query, sizes)
                row_lse = recompute_row(
                    row_o, sequence, query, lane, first_column, columns, first_v, arrays, strides, sizes, score
                )
                if write_lse and tile.part == 0 and lane == 0:
                    arrays.lse[lse_row(sequence, head, query.q_index, sizes)] = row_lse

    return recompute_rows


def of_cache(config: Any) -> Any:
    """-> recompute_rows, a device function, for a cache. Each row of the tile has a uint32 in shared memory,
    config.ROW_STATE_BYTES from the next, that is not 0 if the row is not finite."""
    group, place_of_key, columns = config.group_size, pages.key_places(config), config.head_dim_v
    words, warps, real = -(-config.group_columns // 32), config.threads // 32, numbers.of(config.compute_dtype).real

    @inlined
    def row_of_key(by, sequence, h_kv, key, of_all):
        arrays, strides, sizes = of_all
        page, row = place_of_key(sequence, key, arrays, strides, sizes)
        page = min(max(page, int64(0)), sizes.pages - 1)
        return page * by[0] + h_kv * by[1] + row * by[2]

    @inlined
    def row_of_v(of_v, key, arrays, strides, sizes):
        sequence, h_kv = of_v
        return row_of_key(strides.v, sequence, h_kv, key, (arrays, strides, sizes))

    recompute_row = _of_row(config.scores, row_of_v, row_of_key)

    @inlined
    def recompute_rows(flags, sequence, h_kv, first_row, rows_left, warp, lane, arrays, strides, sizes, score):
        """The warps share the marked ones of a tile's rows, which begin with row first_row of KV head h_kv."""
        row_o = local.array(words, real)
        for row in range(warp, rows_left, warps):
            if ld_st.load_b32(int32(flags + row * config.ROW_STATE_BYTES)) != 0:
                q_index = int32(uint32(first_row + row) // uint32(group))
                head = int32(h_kv * group + first_row + row - q_index * group)
                query, of_v = query_of(sequence, head, int64(q_index), sizes), (sequence, h_kv)
                recompute_row(row_o, sequence, query, lane, 0, int32(columns), of_v, arrays, strides, sizes, score)

    return recompute_rows
