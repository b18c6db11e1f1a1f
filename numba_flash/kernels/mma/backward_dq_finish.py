"""Completes dQ after its parts (backward_dq_parts.py). Rows to which no key tile contributes become 0. Rows that came
out NaN or Inf are computed again without the keys that they may not see (kernels/recompute/queries.py).

Launch: grid (batch * heads * query tiles). dq is contiguous.
"""

from numba import cuda, int32, int64, uint32

from ...ptx import shfl, special
from ..recompute import queries as recompute
from ..steps import elements, numbers
from ..steps.basics import inlined, lane_and_warp
from ..steps.sequence import key_range, query_row
from . import work_tile


def make(config):
    real = numbers.of(config.compute_dtype).real
    load, store = elements.loader(config.dtype, real), elements.storer(config.dtype)
    work_of, bfly = work_tile.of_queries(config, config.tile_m), shfl.bfly_b32
    recompute_queries = recompute.make(config)

    @inlined
    def has_parts(tile, sizes):
        last_query = min(tile.first_query + config.tile_m, tile.sequence.seqlen_q) - 1
        begin, _, _, stop = key_range(tile.sequence, tile.first_query, last_query, sizes, config.tile_n)
        return begin < stop

    @inlined
    def look_at_row(row_at, lane, seen, arrays):
        """-> whether the row is finite, in this lane's columns; writes 0 if no key tile wrote it."""
        nonfinite = real(0)
        for x in range(lane, config.head_dim, 32):
            if seen:
                nonfinite += load(arrays.dq, row_at + x) * real(0)  # NaN when it is NaN or Inf
            else:
                store(arrays.dq, row_at + x, real(0))
        return nonfinite == real(0)

    @cuda.jit
    def flash_attention_mma_dq_finish(arrays, strides, sizes, score):
        lane, warp = lane_and_warp()
        tile = work_of(special.block_index(), arrays, strides, sizes)
        seen, first_row = has_parts(tile, sizes), int32(warp * config.ROWS_OF_WARP)
        nonfinite = uint32(0)
        for r in range(config.ROWS_OF_WARP):
            query = int64(tile.first_query + first_row + r)
            if query < tile.sequence.seqlen_q:
                if not look_at_row(query_row(strides.dq, tile.sequence, tile.h, query), lane, seen, arrays):
                    nonfinite |= uint32(1) << uint32(r)
        for distance in (1, 2, 4, 8, 16):
            nonfinite |= bfly(nonfinite, distance)
        if nonfinite != 0:
            recompute_queries(nonfinite, first_row, lane, work_tile.query_tile(tile), arrays, strides, sizes, score)

    return flash_attention_mma_dq_finish
