"""Completes dQ after its parts (backward_dq_parts.py). Rows to which no key tile contributes become 0. Rows that came
out NaN or Inf are computed again without the keys that they may not see (kernels/steps/recompute_queries.py).

Launch: grid (batch * heads * query tiles), block (config.threads). dq is contiguous.
"""

from numba import cuda, int32, int64, uint32

from ...ptx import shfl, special
from ..score import fragments, positions
from ..steps import elements, numbers
from ..steps import recompute_queries as recompute
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.query_tile import QueryTile, TileKeys
from ..steps.old_sequence import key_range
from ..steps.tiles import row_base


def make(config):
    real = numbers.of(config.compute_dtype).real
    load, store = elements.loader(config.dtype, real), elements.storer(config.dtype)
    keys_and_start, row_term = positions.make(config), fragments.chain(config).row_term
    recompute_queries, bfly = recompute.make(config), shfl.bfly_b32

    @inlined
    def has_parts(tile, tile_keys, sizes):
        last_pos = tile_keys.position + min(sizes.seqlen_q - tile.first_query, config.tile_m) - 1
        begin, _, _, stop = key_range(tile_keys.position, last_pos, tile_keys.keys, sizes, config.tile_n)
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
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        m_tiles = divide(int32(sizes.seqlen_q) + int32(config.tile_m - 1), config.tile_m)
        head_of_all = divide(special.block_index(), m_tiles)
        b = divide(head_of_all, sizes.heads)
        h = int32(head_of_all - b * sizes.heads)
        first_query = int32((special.block_index() - head_of_all * m_tiles) * config.tile_m)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        tile = QueryTile(b, h, first_query, 0)
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        tile_keys = TileKeys(h_kv, int32(keys), first_query + q_start)
        seen, first_row = has_parts(tile, tile_keys, sizes), int32(warp * config.ROWS_OF_WARP)
        nonfinite = uint32(0)
        for r in range(config.ROWS_OF_WARP):
            query = int64(first_query + first_row + r)
            if query < sizes.seqlen_q:
                if not look_at_row(row_base(strides.dq, b, h, query), lane, seen, arrays):
                    nonfinite |= uint32(1) << uint32(r)
        for distance in (1, 2, 4, 8, 16):
            nonfinite |= bfly(nonfinite, distance)
        if nonfinite != 0:
            term = row_term(b, h, arrays, strides)
            recompute_queries(nonfinite, first_row, lane, tile, term, arrays, strides, sizes, score)

    return flash_attention_mma_dq_finish
