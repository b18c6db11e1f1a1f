"""Rows of O over a cache that came out NaN or Inf, computed again without the keys that they do not see (rows.py)."""

from typing import Any

from numba import int32, int64, uint32

from ...ptx import ld_st, local
from ..steps import numbers, pages
from ..steps.basics import inlined
from ..steps.sequence import query_of, query_row
from . import rows


def make(config: Any) -> Any:
    """-> recompute_rows, a device function. Each row of the tile has a uint32 in shared memory as in rows.py."""
    made, group, place_of_key = numbers.of(config.compute_dtype), config.group_size, pages.key_places(config)
    words, warps = -(-config.group_columns // 32), config.threads // 32

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

    recompute_row, of_pair = rows.of_row(config.scores, row_of_key, row_of_v)

    @inlined
    def recompute_rows(flags, sequence, h_kv, first_row, rows_left, warp, lane, arrays, strides, sizes, score):
        """The warps share the marked ones of a tile's rows, which begin with row first_row of KV head h_kv."""
        row_o = local.array(words, made.real)
        for row in range(warp, rows_left, warps):
            if ld_st.load_b32(int32(flags + row * config.ROW_STATE_BYTES)) != 0:
                q_index = int32(uint32(first_row + row) // uint32(group))
                head = int32(h_kv * group + first_row + row - q_index * group)
                query, of_v = query_of(sequence, head, int64(q_index), sizes), (sequence, h_kv)
                columns = int32(config.head_dim_v)
                l, _ = recompute_row(row_o, sequence, query, lane, columns, of_v, arrays, strides, sizes, score)
                inverse = made.real(0) if l == made.real(0) else made.real(1) / l
                at = query_row(strides.o, sequence, head, query.q_index)
                of_pair.store(row_o, inverse, arrays.o, at, strides.o[3], columns, lane)

    return recompute_rows
