"""Rows of O that came out NaN or Inf, computed again without what they may not see.

A tensor core multiplies every p by every v of a tile, also the p of 0 of a key that the mask removed, and
0 * NaN is NaN. Such values are rare (uninitialised padding, a diverged model), so the loop over tiles does
not look for them: whoever finds a row of O not finite at the end leaves a note, and the row is computed
here, key by key, without the removed ones.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64

from ...ptx import approx, ld_st, shfl
from . import elements
from .inlined import inlined
from .plain import row_keys


def make(config, warp_rows, score):
    """-> repair_rows, a device function. score: `one` of steps/fragment_scores.

    A note is 8 bytes of shared memory for each row of the tile: a uint32 that is not 0 when the row is
    not finite, and the row's lse as a float32 in units of log2(e).
    """
    head_dim, head_dim_v, width = config.head_dim, config.head_dim_v, config.width
    group, queries, note_bytes = config.group, config.queries, config.NOTE_BYTES
    has_alibi, columns = config.alibi_dtype is not None, -(-width // 32)
    load, store = elements.loader(config.dtype, float32), elements.storer(config.dtype)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    bfly, ex2, load_b32, minus_inf = shfl.bfly_f32, approx.ex2, ld_st.load_b32, float32(-math.inf)

    @inlined
    def repair_rows(
        first_row, lane, notes, pointers, strides, b, h, h_kv, first_query, seqlen_q, part,
        tile_pos, left, right, keys, alibi_slopes, alibi_strides, scale, softcap,
    ):  # fmt: skip
        """One warp, its rows from first_row on, of the tile that begins at first_query and at position tile_pos."""
        q, k, v, o = pointers
        q_strides, k_strides, v_strides, o_strides = strides
        queries_left = int32(min(seqlen_q - first_query, queries))
        columns_left = int32(min(head_dim_v - part * width, width))  # what lies behind them is another block's
        row_o = cuda.local.array(columns, float32)
        for row in range(first_row, first_row + warp_rows):
            query, member = row // group, row % group
            note = notes + row * note_bytes
            if query < queries_left and load_b32(note) != 0:
                index, lse_log2 = first_query + query, load_b32(note + 4).view(np.float32)
                slope = float32(0)
                if has_alibi:
                    slope = load_slope(alibi_slopes, b * alibi_strides[0] + (h + member) * alibi_strides[1])
                q_at = b * q_strides[0] + (h + member) * q_strides[1] + index * q_strides[2]
                k_at = b * k_strides[0] + h_kv * k_strides[1]
                v_at = b * v_strides[0] + h_kv * v_strides[1] + part * width
                q_pos = tile_pos + query
                for c in range(columns):
                    row_o[c] = float32(0)
                first_key, end_key = row_keys(q_pos, left, right, keys)
                if lse_log2 == minus_inf:  # no score but -inf: a row without weights, as if it saw no key
                    end_key = first_key
                for key in range(first_key, end_key):
                    product = float32(0)
                    for x in range(lane, head_dim, 32):
                        product += load(q, q_at + x) * load(k, k_at + key * k_strides[2] + x)
                    for distance in (1, 2, 4, 8, 16):
                        product += bfly(product, distance)
                    p = ex2(score(product, slope, float32(q_pos - key), scale, softcap) - lse_log2)
                    if p != 0:
                        for c in range(columns):
                            x = int64(lane + 32 * c)
                            if x < columns_left:
                                row_o[c] += p * load(v, v_at + key * v_strides[2] + x)
                at = b * o_strides[0] + (h + member) * o_strides[1] + index * o_strides[2] + part * width * o_strides[3]
                for c in range(columns):
                    x = int64(lane + 32 * c)
                    if x < columns_left:
                        store(o, at + x * o_strides[3], row_o[c])

    return repair_rows
