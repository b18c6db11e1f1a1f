"""Rows of O that came out NaN or Inf, computed again from the beginning, with a maximum and a sum of their own.

It replaces recompute_rows.py for elements of more than 16 bits. In 16 bits a row's lse is right whatever V is. In
float32 an Inf in K or Q also makes NaN (kernels/mma/products_float32.py), and so does a number that tf32 rounds up to
Inf.

A sum of weights times large numbers of V may be Inf before it is divided by l. Here all weights of a row are scaled
down by a power of 2, so that l is at most 1. Then no sum is larger than the largest number of V.
"""

import math

from numba import int32, int64

from ...ptx import ld_st, local
from ..score import At, at_scores, counts, fragment_functions, fragments, sum_terms
from ..score.stage import FragmentAt, exponent_unit
from . import elements, numbers
from .inlined import inlined
from .integers import divide
from .plain import row_keys
from .sequence import key_row, lse_row, query_row
from .sequence import make as make_sequence


def make(config, warp_rows):
    """-> recompute_rows, a device function.

    Each row of the tile has a uint32 in shared memory, config.ROW_STATE_BYTES from the next, that is not 0 if the row
    is not finite.
    """
    columns = -(-config.group_columns // 32)
    real, _, log2, _, _, _, warp_sum, minus_inf, _ = numbers.of(config.compute_dtype)
    load, store = elements.loader(config.dtype, real), elements.storer(config.dtype)
    chain, (added, visible) = fragments.chain(config), at_scores.make(config)
    value, row_term, exponential = chain.value, chain.row_term, fragments.exponential_of(config)
    row_start, unit = sum_terms.start(config), real(exponent_unit(config))
    apply_functions, count = fragment_functions.make(config).apply_alone, counts.make(config)
    sequence_of = make_sequence(config)
    load_b32, ln_2, to_natural = ld_st.load_b32, real(math.log(2)), real(1 / exponent_unit(config))

    @inlined
    def recompute_rows(first_row, lane, row_states, tile, arrays, strides, sizes, score):
        """One warp computes its marked rows from first_row on, of a QueryTile."""
        sequence, h_kv = (
            sequence_of(tile.b, arrays, strides, sizes),
            divide(tile.h, divide(sizes.heads, sizes.heads_kv)),
        )
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.queries))
        first_column = tile.part * config.group_columns
        columns_left = int32(
            min(config.head_dim_v - first_column, config.group_columns)
        )  # the next row states belong to another block
        row_o = local.array(columns, real)
        for row in range(first_row, first_row + warp_rows):
            query, head = row // config.group_size, tile.h + row % config.group_size
            if query < queries_left and load_b32(row_states + row * config.ROW_STATE_BYTES) != 0:
                index = tile.first_query + query
                term = row_term(tile.b, head, arrays, strides)
                q_at = query_row(strides.q, sequence, head, index)
                k_at = key_row(strides.k, sequence, h_kv, 0)
                v_at = key_row(strides.v, sequence, h_kv, 0) + first_column
                q_pos = index + sequence.q_start
                first_key, end_key = row_keys(q_pos, sizes.left, sizes.right, sequence.keys)
                largest = real(1)  # an upper bound of a weight, a power of 2
                while largest * real(end_key - first_key + 1) > real(1):  # a sink is one more term
                    largest *= real(0.5)
                m, l = row_start(tile.b, head, arrays, strides)
                m *= unit
                l *= largest
                for c in range(columns):
                    row_o[c] = real(0)
                for key in range(first_key, end_key):
                    product = real(0)
                    for x in range(lane, config.head_dim, 32):
                        product += load(arrays.q, q_at + x) * load(arrays.k, k_at + key * strides.k[2] + x)
                    product = warp_sum(product)
                    seen = visible(tile.b, head, index, key, arrays, strides)
                    if seen:
                        at = At(tile.b, head, index, key, q_pos)
                        product, seen = apply_functions(product, at, arrays, strides, score)
                    bias = added(tile.b, head, index, key, arrays, strides)
                    s = value(product, FragmentAt(term, real(q_pos - key), bias), score)
                    s = s if seen else minus_inf
                    if s > m:
                        alpha = exponential(m - s)
                        l *= alpha
                        for c in range(columns):
                            row_o[c] *= alpha
                        m = s
                    if s != minus_inf:
                        p = exponential(s - m) * largest
                        l += p
                        p *= count(At(tile.b, head, index, key, q_pos), arrays, sizes, score)
                        if p != 0:
                            for c in range(columns):
                                x = int64(lane + 32 * c)
                                if x < columns_left:
                                    row_o[c] += p * load(arrays.v, v_at + key * strides.v[2] + x)
                empty = l == real(0)
                inverse = real(0) if empty else real(1) / l
                at = query_row(strides.o, sequence, head, index) + first_column * strides.o[3]
                for c in range(columns):
                    x = int64(lane + 32 * c)
                    if x < columns_left:
                        store(arrays.o, at + x * strides.o[3], row_o[c] * inverse)
                if config.write_lse and tile.part == 0 and lane == 0:
                    row_lse = minus_inf if empty else m * to_natural + log2(l / largest) * ln_2
                    arrays.lse[lse_row(sequence, head, index, sizes)] = row_lse

    return recompute_rows
