"""Rows of dQ that came out NaN or Inf, computed again without the keys that they may not see (recompute_keys.py)."""

import math

from numba import int32, int64, uint32

from ...ptx import local
from ..score import At, at_scores, counts, fragments, gradient_functions
from ..score.stage import FragmentAt
from . import elements, lse_delta, numbers
from .inlined import TRUE, inlined
from .integers import divide
from .plain import row_keys
from .sequence import key_row, query_row
from .sequence import make as make_sequence


def make(config, of_keys=False):
    """-> recompute_queries, a device function. of_keys: the kernel's mask bits have keys as rows."""
    head_dim, head_dim_v, made = config.head_dim, config.head_dim_v, numbers.of(config.compute_dtype)
    parts, parts_v = -(-head_dim // 32), -(-head_dim_v // 32)
    (_, weight_or_zero), (added, visible) = fragments.weights_at(config), at_scores.make(config, of_keys)
    load, store = elements.loader(config.dtype, made.real), elements.storer(config.dtype)
    count, ask = counts.make(config), gradient_functions.alone(config, derivative=True)
    has_functions = gradient_functions.present(config)
    inf = made.real(math.inf)
    of_query, sequence_of = lse_delta.of_query(config), make_sequence(config)

    @inlined
    def recompute_queries(nonfinite, first_row, lane, tile, term, arrays, strides, sizes, score):
        """One warp computes those of its rows from first_row on that have a bit in nonfinite, of a QueryTile."""
        b, h, h_kv = tile.b, tile.h, divide(tile.h, divide(sizes.heads, sizes.heads_kv))
        sequence = sequence_of(b, arrays, strides, sizes)
        row_dq = local.array(parts, made.real)
        row = int32(first_row)
        while nonfinite != 0:
            found = uint32(nonfinite & uint32(1))
            nonfinite, row = uint32(nonfinite >> uint32(1)), int32(row + 1)
            if found != 0:
                query = int64(tile.first_query + row - 1)
                for c in range(parts):
                    row_dq[c] = made.real(0)
                q_at, do_at = query_row(strides.q, sequence, h, query), query_row(strides.do, sequence, h, query)
                lse, delta = of_query(sequence, h, query, arrays, sizes)
                q_pos = query + sequence.q_start
                first_key, end_key = row_keys(q_pos, sizes.left, sizes.right, sequence.keys)
                if lse == inf:
                    end_key = first_key
                for key in range(first_key, end_key):
                    k_at, v_at = key_row(strides.k, sequence, h_kv, key), key_row(strides.v, sequence, h_kv, key)
                    product, dp = made.real(0), made.real(0)
                    for c in range(parts):
                        x = int32(lane + 32 * c)
                        if x < head_dim:
                            product += load(arrays.q, q_at + x) * load(arrays.k, k_at + x)
                    for c in range(parts_v):
                        x = int32(lane + 32 * c)
                        if x < head_dim_v:
                            dp += load(arrays.do, do_at + x) * load(arrays.v, v_at + x)
                    product, dp = made.warp_sum(product), made.warp_sum(dp)
                    seen, slope = True, made.real(1)
                    if has_functions:
                        seen = visible(b, h, query, key, arrays, strides)
                        if seen:
                            product, slope, seen = ask(
                                product, At(b, h, query, key, q_pos), TRUE, arrays, strides, score
                            )
                    here = FragmentAt(term, made.real(q_pos - key), added(b, h, query, key, arrays, strides))
                    p, derivative = weight_or_zero(product, here, score, lse)
                    counts = count(At(b, h, query, key, q_pos), arrays, sizes, score)
                    dp = dp * counts if counts != 0 else made.real(0)  # no NaN from a key whose weight was dropped
                    ds = p * (dp - delta) * score.scale * derivative
                    if has_functions:
                        ds = ds * slope if seen else made.real(0)
                    if p != 0 and ds != 0 and visible(b, h, query, key, arrays, strides):
                        for c in range(parts):
                            x = int32(lane + 32 * c)
                            if x < head_dim:
                                row_dq[c] += ds * load(arrays.k, k_at + x)
                at = query_row(strides.dq, sequence, h, query)
                for c in range(parts):
                    x = int32(lane + 32 * c)
                    if x < head_dim:
                        store(arrays.dq, at + x, row_dq[c])

    return recompute_queries
