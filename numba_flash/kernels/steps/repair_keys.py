"""Rows of dK and dV that came out NaN or Inf, computed again without what they may not see.

As in steps/repair_rows: a tensor core multiplies every p and dS of a tile, also those of 0 of a query that does
not see the key, and 0 * NaN is NaN. Such a row is computed here, query by query, without the removed ones.
"""

import math

from numba import cuda, float32, int32, int64, uint32

from ...ptx import shfl
from . import elements, row_facts
from .inlined import inlined
from .integers import divide
from .plain import key_queries


def make(config, sure_weight, through_softcap):
    """-> repair_keys, a device function. sure_weight, through_softcap: of steps/score_gradients."""
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    of_dk, of_dv, has_softcap = config.of_dk, config.of_dv, config.softcap
    has_alibi, parts, parts_v = config.alibi_dtype is not None, -(-head_dim // 32), -(-head_dim_v // 32)
    load, store = elements.loader(config.dtype, float32), elements.storer(config.dtype)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    bfly, inf = shfl.bfly_f32, float32(math.inf)
    pieces, piece, place, minus_delta_at = row_facts.pieces, row_facts.PIECE, row_facts.place, row_facts.MINUS_DELTA

    @inlined
    def repair_keys(
        suspects, first_row, lane, pointers, strides, results, result_strides, row_facts, alibi_slopes, alibi_strides,
        b, heads, heads_kv, h_kv, first_key, q_start, seqlen_q, left, right, scale, softcap,
    ):  # fmt: skip
        """One warp, those of its rows from first_row on that have a bit in suspects, of the tile at first_key."""
        q, k, v, do = pointers
        q_strides, k_strides, v_strides, do_strides = strides
        dk, dv = results
        dk_strides, dv_strides = result_strides
        row_dk = cuda.local.array(parts, float32)
        row_dv = cuda.local.array(parts_v, float32)
        row = int32(first_row)
        while suspects != 0:
            found = uint32(suspects & uint32(1))
            suspects, row = uint32(suspects >> uint32(1)), int32(row + 1)
            if found != 0:
                key = int64(first_key + row - 1)
                for c in range(parts):
                    row_dk[c] = float32(0)
                for c in range(parts_v):
                    row_dv[c] = float32(0)
                k_at = b * k_strides[0] + h_kv * k_strides[1] + key * k_strides[2]
                v_at = b * v_strides[0] + h_kv * v_strides[1] + key * v_strides[2]
                first_query, end_query = key_queries(key, q_start, left, right, seqlen_q)
                group = divide(heads, heads_kv)
                for member in range(group):
                    h = int32(h_kv * group + member)
                    slope = float32(0)
                    if has_alibi:
                        slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
                    for query in range(first_query, end_query):
                        q_at = b * q_strides[0] + h * q_strides[1] + query * q_strides[2]
                        do_at = b * do_strides[0] + h * do_strides[1] + query * do_strides[2]
                        at = int64(b * heads + h) * (pieces(seqlen_q) * piece) + place(query)
                        product, dp = float32(0), float32(0)
                        for c in range(parts):
                            x = int32(lane + 32 * c)
                            if x < head_dim:
                                product += load(q, q_at + x) * load(k, k_at + x)
                        if of_dk:
                            for c in range(parts_v):
                                x = int32(lane + 32 * c)
                                if x < head_dim_v:
                                    dp += load(do, do_at + x) * load(v, v_at + x)
                        for distance in (1, 2, 4, 8, 16):
                            product += bfly(product, distance)
                            dp += bfly(dp, distance)
                        lse_log2, minus_delta = row_facts[at], row_facts[at + minus_delta_at]
                        p = float32(0)
                        if lse_log2 != inf:
                            away = float32(query + q_start - key)
                            p = sure_weight(product, slope, away, scale, softcap, lse_log2)
                        if p != 0:
                            ds = float32(0)
                            if of_dk:
                                ds = p * (dp + minus_delta) * scale
                                if has_softcap:
                                    ds *= through_softcap(product, scale, softcap)
                            if of_dv:
                                for c in range(parts_v):
                                    x = int32(lane + 32 * c)
                                    if x < head_dim_v:
                                        row_dv[c] += p * load(do, do_at + x)
                            if ds != 0:
                                for c in range(parts):
                                    x = int32(lane + 32 * c)
                                    if x < head_dim:
                                        row_dk[c] += ds * load(q, q_at + x)
                if of_dk:
                    at = b * dk_strides[0] + h_kv * dk_strides[1] + key * dk_strides[2]
                    for c in range(parts):
                        x = int32(lane + 32 * c)
                        if x < head_dim:
                            store(dk, at + x, row_dk[c])
                if of_dv:
                    at = b * dv_strides[0] + h_kv * dv_strides[1] + key * dv_strides[2]
                    for c in range(parts_v):
                        x = int32(lane + 32 * c)
                        if x < head_dim_v:
                            store(dv, at + x, row_dv[c])

    return repair_keys
