"""Rows of dK and dV that came out NaN or Inf, computed again without the queries that do not see the key (pairs.py)."""

from typing import Any

from numba import int32, int64, uint32

from ...ptx import local
from ..steps import numbers
from ..steps.basics import divide, inlined, key_queries
from ..steps.sequence import key_row, query_row
from . import pairs


def make(config: Any, of_dk: bool, of_dv: bool) -> Any:
    """-> recompute_keys, a device function, for one of the two gradients or both."""
    made, of_pair = numbers.of(config.compute_dtype), pairs.make(config, of_keys=True, of_ds=of_dk)
    words, words_v, one = -(-config.head_dim // 32), -(-config.head_dim_v // 32), made.real(1)

    @inlined
    def recompute_keys(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score):
        """One warp computes those of its rows from first_row on that have a bit in nonfinite, of the tile at
        first_key."""
        row_dk, row_dv = local.array(words, made.real), local.array(words_v, made.real)
        group, row = divide(sizes.heads, sizes.heads_kv), int32(first_row)
        while nonfinite != 0:
            if nonfinite & uint32(1) != 0:
                key = int64(first_key + row)
                of_pair.clear(row_dk, config.head_dim)
                of_pair.clear(row_dv, config.head_dim_v)
                first, end = key_queries(key, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
                for member in range(group):
                    h = int32(h_kv * group + member)
                    for query in range(first, end):
                        p, ds = of_pair.gradients(sequence, h, query, key, lane, arrays, strides, sizes, score)
                        if of_dv:
                            at = query_row(strides.do, sequence, h, query)
                            of_pair.add(row_dv, p, arrays.do, at, config.head_dim_v, lane)
                        at = query_row(strides.q, sequence, h, query)
                        of_pair.add(row_dk, ds, arrays.q, at, config.head_dim, lane)
                if of_dk:
                    at = key_row(strides.dk, sequence, h_kv, key)
                    of_pair.store(row_dk, one, arrays.dk, at, 1, config.head_dim, lane)
                if of_dv:
                    at = key_row(strides.dv, sequence, h_kv, key)
                    of_pair.store(row_dv, one, arrays.dv, at, 1, config.head_dim_v, lane)
            nonfinite, row = uint32(nonfinite >> uint32(1)), int32(row + 1)

    return recompute_keys
