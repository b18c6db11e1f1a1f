"""Rows of dK and dV that came out NaN or Inf, computed again without the queries that do not see the key.

As in recompute_rows.py: a tensor core multiplies every p and dS of a tile, also the zeros of a query that does not see
the key, and 0 * NaN is NaN. Such a row is computed here, query by query, without those.
"""

import math

from numba import int32, int64, uint32

from ...ptx import local
from ..score import At, at_scores, counts, fragments, gradient_functions
from ..score.stage import FragmentAt
from . import elements, lse_delta, numbers
from .inlined import TRUE, inlined
from .integers import divide
from .plain import key_queries
from .sequence import key_row, query_row


def make(config, of_dk, of_dv):
    """-> recompute_keys, a device function, for one of the two gradients or both."""
    head_dim, head_dim_v, made = config.head_dim, config.head_dim_v, numbers.of(config.compute_dtype)
    parts, parts_v = -(-head_dim // 32), -(-head_dim_v // 32)
    row_term = fragments.chain(config).row_term
    (_, weight_or_zero), (added, visible) = fragments.weights_at(config), at_scores.make(config, of_keys=True)
    load, store = elements.loader(config.dtype, made.real), elements.storer(config.dtype)
    count, ask = counts.make(config), gradient_functions.alone(config, derivative=of_dk)
    has_functions = gradient_functions.present(config)
    inf = made.real(math.inf)
    of_query = lse_delta.of_query(config)

    @inlined
    def recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score):
        """One warp computes those of its rows from first_row on that have a bit in nonfinite, of the tile at
        first_key."""
        b, q_start = sequence.b, sequence.q_start
        row_dk = local.array(parts, made.real)
        row_dv = local.array(parts_v, made.real)
        row = int32(first_row)
        while nonfinite != 0:
            found = uint32(nonfinite & uint32(1))
            nonfinite, row = uint32(nonfinite >> uint32(1)), int32(row + 1)
            if found != 0:
                key = int64(first_key + row - 1)
                for c in range(parts):
                    row_dk[c] = made.real(0)
                for c in range(parts_v):
                    row_dv[c] = made.real(0)
                k_at, v_at = key_row(strides.k, sequence, h_kv, key), key_row(strides.v, sequence, h_kv, key)
                first_query, end_query = key_queries(key, q_start, sizes.left, sizes.right, sequence.seqlen_q)
                group = divide(sizes.heads, sizes.heads_kv)
                for member in range(group):
                    h = int32(h_kv * group + member)
                    term = row_term(b, h, arrays, strides)
                    for query in range(first_query, end_query):
                        q_at, do_at = (
                            query_row(strides.q, sequence, h, query),
                            query_row(strides.do, sequence, h, query),
                        )
                        product, dp = made.real(0), made.real(0)
                        for c in range(parts):
                            x = int32(lane + 32 * c)
                            if x < head_dim:
                                product += load(arrays.q, q_at + x) * load(arrays.k, k_at + x)
                        if of_dk:
                            for c in range(parts_v):
                                x = int32(lane + 32 * c)
                                if x < head_dim_v:
                                    dp += load(arrays.do, do_at + x) * load(arrays.v, v_at + x)
                        product, dp = made.warp_sum(product), made.warp_sum(dp)
                        lse, delta = of_query(sequence, h, query, arrays, sizes)
                        p, derivative = made.real(0), made.real(1)
                        seen, slope = lse != inf and visible(b, h, query, key, arrays, strides), made.real(1)
                        if has_functions:
                            if seen:
                                at = At(b, h, query, key, query + q_start)
                                product, slope, seen = ask(product, at, TRUE, arrays, strides, score)
                        if seen:
                            bias = added(b, h, query, key, arrays, strides)
                            here = FragmentAt(term, made.real(query + q_start - key), bias)
                            p, derivative = weight_or_zero(product, here, score, lse)
                            if has_functions:
                                derivative *= slope
                        if p != 0:
                            counts = count(At(b, h, query, key, query + q_start), arrays, sizes, score)
                            ds = made.real(0)
                            if of_dk:
                                dp = dp * counts if counts != 0 else made.real(0)
                                ds = p * (dp - delta) * score.scale * derivative
                            if of_dv and counts != 0:
                                for c in range(parts_v):
                                    x = int32(lane + 32 * c)
                                    if x < head_dim_v:
                                        row_dv[c] += p * counts * load(arrays.do, do_at + x)
                            if ds != 0:
                                for c in range(parts):
                                    x = int32(lane + 32 * c)
                                    if x < head_dim:
                                        row_dk[c] += ds * load(arrays.q, q_at + x)
                if of_dk:
                    at = key_row(strides.dk, sequence, h_kv, key)
                    for c in range(parts):
                        x = int32(lane + 32 * c)
                        if x < head_dim:
                            store(arrays.dk, at + x, row_dk[c])
                if of_dv:
                    at = key_row(strides.dv, sequence, h_kv, key)
                    for c in range(parts_v):
                        x = int32(lane + 32 * c)
                        if x < head_dim_v:
                            store(arrays.dv, at + x, row_dv[c])

    return recompute_keys
