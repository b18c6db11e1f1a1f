"""Rows of dQ that came out NaN or Inf, computed again without the keys that they do not see (pairs.py)."""

from typing import Any

from numba import int32, int64, uint32

from ...ptx import local
from ..steps import elements, numbers
from ..steps.basics import inlined
from ..steps.sequence import key_row, kv_head, make as make_sequence, query_of, query_row
from . import pairs


def make(config: Any, of_keys: bool = False, of_dbias: bool = False) -> Any:
    """-> recompute_queries, a device function. of_keys: the kernel's mask bits have keys as rows. of_dbias: it has
    written dbias, which is 0 where the weight is."""
    made, of_pair, sequence_of = numbers.of(config.compute_dtype), pairs.make(config, of_keys), make_sequence(config)
    words, one, store = -(-config.head_dim // 32), made.real(1), elements.storer(config.dtype)

    @inlined
    def recompute_queries(nonfinite, first_row, lane, tile, arrays, strides, sizes, score):
        """One warp computes those of its rows from first_row on that have a bit in nonfinite, of a QueryTile."""
        sequence, h_kv = sequence_of(tile.b, arrays, strides, sizes), kv_head(tile.h, sizes)
        row_dq, row = local.array(words, made.real), int32(first_row)
        while nonfinite != 0:
            if nonfinite & uint32(1) != 0:
                query = query_of(sequence, tile.h, int64(tile.first_query + row), sizes)
                of_pair.clear(row_dq, config.head_dim)
                for key in range(query.first_key, query.end_key):
                    p, ds = of_pair.gradients(sequence, tile.h, query.q_index, key, lane, arrays, strides, sizes, score)
                    of_pair.add(row_dq, ds, arrays.k, key_row(strides.k, sequence, h_kv, key), config.head_dim, lane)
                    if of_dbias:
                        if p == 0 and lane == 0:
                            at = tile.b * strides.dbias[0] + tile.h * strides.dbias[1] + key
                            store(arrays.dbias, at + query.q_index * strides.dbias[2], made.real(0))
                at = query_row(strides.dq, sequence, tile.h, query.q_index)
                of_pair.store(row_dq, one, arrays.dq, at, 1, config.head_dim, lane)
            nonfinite, row = uint32(nonfinite >> uint32(1)), int32(row + 1)

    return recompute_queries
