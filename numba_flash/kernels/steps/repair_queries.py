"""Rows of dQ that came out NaN or Inf, computed again without the keys that they may not see (steps/repair_keys)."""

import math

from numba import cuda, float32, int32, int64, uint32

from ...ptx import shfl
from . import elements, row_facts
from .inlined import inlined
from .plain import row_keys


def make(config, sure_weight, through_softcap):
    """-> repair_queries, a device function. sure_weight, through_softcap: of steps/score_gradients."""
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    has_softcap, parts, parts_v = config.softcap, -(-head_dim // 32), -(-head_dim_v // 32)
    load, store = elements.loader(config.dtype, float32), elements.storer(config.dtype)
    bfly, inf = shfl.bfly_f32, float32(math.inf)
    pieces, piece, place, minus_delta_at = row_facts.pieces, row_facts.PIECE, row_facts.place, row_facts.MINUS_DELTA

    @inlined
    def repair_queries(
        suspects, first_row, lane, pointers, strides, dq, dq_strides, row_facts, slope,
        b, h, heads, h_kv, first_query, q_start, seqlen_q, keys, left, right, scale, softcap,
    ):  # fmt: skip
        """One warp, those of its rows from first_row on that have a bit in suspects, of the tile at first_query."""
        q, k, v, do = pointers
        q_strides, k_strides, v_strides, do_strides = strides
        row_dq = cuda.local.array(parts, float32)
        row = int32(first_row)
        while suspects != 0:
            found = uint32(suspects & uint32(1))
            suspects, row = uint32(suspects >> uint32(1)), int32(row + 1)
            if found != 0:
                query = int64(first_query + row - 1)
                for c in range(parts):
                    row_dq[c] = float32(0)
                q_at = b * q_strides[0] + h * q_strides[1] + query * q_strides[2]
                do_at = b * do_strides[0] + h * do_strides[1] + query * do_strides[2]
                at = int64(b * heads + h) * (pieces(seqlen_q) * piece) + place(query)
                lse_log2, minus_delta = row_facts[at], row_facts[at + minus_delta_at]
                first_key, end_key = row_keys(query + q_start, left, right, keys)
                if lse_log2 == inf:
                    end_key = first_key
                for key in range(first_key, end_key):
                    k_at = b * k_strides[0] + h_kv * k_strides[1] + key * k_strides[2]
                    v_at = b * v_strides[0] + h_kv * v_strides[1] + key * v_strides[2]
                    product, dp = float32(0), float32(0)
                    for c in range(parts):
                        x = int32(lane + 32 * c)
                        if x < head_dim:
                            product += load(q, q_at + x) * load(k, k_at + x)
                    for c in range(parts_v):
                        x = int32(lane + 32 * c)
                        if x < head_dim_v:
                            dp += load(do, do_at + x) * load(v, v_at + x)
                    for distance in (1, 2, 4, 8, 16):
                        product += bfly(product, distance)
                        dp += bfly(dp, distance)
                    away = float32(query + q_start - key)
                    p = sure_weight(product, slope, away, scale, softcap, lse_log2)
                    ds = p * (dp + minus_delta) * scale
                    if has_softcap:
                        ds *= through_softcap(product, scale, softcap)
                    if p != 0 and ds != 0:
                        for c in range(parts):
                            x = int32(lane + 32 * c)
                            if x < head_dim:
                                row_dq[c] += ds * load(k, k_at + x)
                at = b * dq_strides[0] + h * dq_strides[1] + query * dq_strides[2]
                for c in range(parts):
                    x = int32(lane + 32 * c)
                    if x < head_dim:
                        store(dq, at + x, row_dq[c])

    return repair_queries
