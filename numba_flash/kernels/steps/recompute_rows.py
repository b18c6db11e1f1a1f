"""Rows of O that came out NaN or Inf, computed again without the keys that they may not see.

A tensor core multiplies every p by every v of a tile, also the p of 0 of a masked key, and 0 * NaN is NaN. Such values
are rare (uninitialised padding, a diverged model), so the loop over tiles does not check for them. At the end a warp
marks rows of O that are not finite. They are computed here, key by key, without the masked keys.
"""

import math

import numpy as np
from numba import float32, int32, int64

from ...ptx import ld_st, local, shfl
from ..score import At, at_scores, counts, fragment_functions, fragments
from ..score.stage import FragmentAt
from . import elements
from .inlined import inlined
from .integers import divide
from .plain import row_keys
from .sequence import key_row, query_row
from .sequence import make as make_sequence


def make(config, warp_rows):
    """-> recompute_rows, a device function.

    Each row of the tile has 8 bytes in shared memory: a uint32 that is not 0 if the row is not finite, and the row's
    lse as a float32 in the scores' units (kernels/score/stage.py).
    """
    columns = -(-config.head_dim_v_padded // 32)
    load, store = elements.loader(config.dtype, float32), elements.storer(config.dtype)
    chain, (added, visible) = fragments.chain(config), at_scores.make(config)
    value, row_term, exponential = chain.value, chain.row_term, fragments.exponential_of(config)
    apply_functions, count = fragment_functions.make(config).apply_alone, counts.make(config)
    sequence_of = make_sequence(config)
    warp_sum, load_b32, minus_inf = shfl.sum_f32, ld_st.load_b32, float32(-math.inf)

    @inlined
    def recompute_rows(first_row, lane, row_states, tile, arrays, strides, sizes, score):
        """One warp computes its marked rows from first_row on, of a QueryTile."""
        sequence, h_kv = (
            sequence_of(tile.b, arrays, strides, sizes),
            divide(tile.h, divide(sizes.heads, sizes.heads_kv)),
        )
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, config.queries))
        first_column = tile.part * config.head_dim_v_padded
        columns_left = int32(
            min(config.head_dim_v - first_column, config.head_dim_v_padded)
        )  # the next row states belong to another block
        row_o = local.array(columns, float32)
        for row in range(first_row, first_row + warp_rows):
            query, head = row // config.group_size, tile.h + row % config.group_size
            note = row_states + row * config.ROW_STATE_BYTES
            if query < queries_left and load_b32(note) != 0:
                index, lse = tile.first_query + query, load_b32(note + 4).view(np.float32)
                term = row_term(tile.b, head, arrays, strides)
                q_at = query_row(strides.q, sequence, head, index)
                k_at = key_row(strides.k, sequence, h_kv, 0)
                v_at = key_row(strides.v, sequence, h_kv, 0) + first_column
                q_pos = index + sequence.q_start
                for c in range(columns):
                    row_o[c] = float32(0)
                first_key, end_key = row_keys(q_pos, sizes.left, sizes.right, sequence.keys)
                if lse == minus_inf:  # only scores of -inf: a row without weights, as if it saw no key
                    end_key = first_key
                for key in range(first_key, end_key):
                    product = float32(0)
                    for x in range(lane, config.head_dim, 32):
                        product += load(arrays.q, q_at + x) * load(arrays.k, k_at + key * strides.k[2] + x)
                    product = warp_sum(product)
                    seen = visible(tile.b, head, index, key, arrays, strides)
                    if seen:
                        at = At(tile.b, head, index, key, q_pos)
                        product, seen = apply_functions(product, at, arrays, strides, score)
                    bias = added(tile.b, head, index, key, arrays, strides)
                    p = exponential(value(product, FragmentAt(term, float32(q_pos - key), bias), score) - lse)
                    p *= count(At(tile.b, head, index, key, q_pos), arrays, sizes, score)
                    if p != 0 and seen:
                        for c in range(columns):
                            x = int64(lane + 32 * c)
                            if x < columns_left:
                                row_o[c] += p * load(arrays.v, v_at + key * strides.v[2] + x)
                at = query_row(strides.o, sequence, head, index) + first_column * strides.o[3]
                for c in range(columns):
                    x = int64(lane + 32 * c)
                    if x < columns_left:
                        store(arrays.o, at + x * strides.o[3], row_o[c])

    return recompute_rows
