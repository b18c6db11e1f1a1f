"""dS of a tile of queries: the loop over keys of listing 8 of docs/backward.md, one thread per query row.

From dS come dQ, the gradient of bias, those of numbers of heads and those of the arrays that a score_mod reads. Each
kernel says what it does with a tile of dS: line 9 for dQ. Letters are those of v2_backward_dkdv.py.
"""

from typing import Any, NamedTuple

from numba import cuda

from ...ptx import local, shared
from ..score import at_key, by_head, make as make_score, tile_walk
from ..steps import elements, rows, tiles
from ..steps.basics import TRUE, inlined, named
from ..steps.sequence import key_range, kv_head, lse_row, make as make_sequence, query_of


class RowTiles(NamedTuple):
    """Tiles in shared memory, and where the thread's own row begins in those of Q, dO and dS."""

    q: Any  # (tile_m, k_row + pad)
    q_at: int
    do: Any  # (tile_m, v_row + pad)
    do_at: int
    ds: Any  # (tile_m, tile_n + pad)
    ds_at: int
    k: Any  # (tile_n, k_row)
    v: Any  # (tile_n, v_row)


def make(config, of_product, use, products_at=0):
    """use(sums, query, tiles, first_key, arrays, strides, sizes, score): called when tiles.ds has the thread's row of
    dS for the keys from first_key on, 0 for keys that are not seen.

    of_product: dS is the gradient of scale * q . k, so it includes the derivative of all stages after the product;
    otherwise it is the gradient of the finished score. products_at: if q . k is stored, too, how far after dS.
    """
    plan, compute = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype]
    at_once = rows.at_once(config.tile_n, config.dtype)
    dot_k, dot_v = rows.dots(config.k_row, at_once, compute(0)), rows.dots(config.v_row, at_once, compute(0))
    load_q = tiles.query_loader(config, config.k_row + config.pad, config.head_dim)
    load_do = tiles.query_loader(config, config.v_row + config.pad, config.head_dim_v)
    load_k = tiles.key_loader(config, config.k_row, config.head_dim)
    load_v = tiles.key_loader(config, config.v_row, config.head_dim_v)
    scores, walk, number_derivative = make_score(config), tile_walk.make(config), by_head(config)
    has_number, sequence_of = number_derivative is not None, make_sequence(config)

    @inlined
    def query_tile(block, arrays, strides, sizes):
        """-> (sequence, h, first row)."""
        m_tiles = (sizes.seqlen_q + config.tile_m - 1) // config.tile_m
        b, h = block // (sizes.heads * m_tiles), block // m_tiles % sizes.heads
        return sequence_of(b, arrays, strides, sizes), h, block % m_tiles * config.tile_m

    @inlined
    def row_tiles(thread):
        smem = cuda.shared.array(0, compute)
        q, do, ds = shared.pointer(smem, plan.q), shared.pointer(smem, plan.do), shared.pointer(smem, plan.ds)
        q_at, do_at = thread * (config.k_row + config.pad), thread * (config.v_row + config.pad)
        ds_at, k, v = thread * (config.tile_n + config.pad), shared.pointer(smem, plan.k), shared.pointer(smem, plan.v)
        return RowTiles(q, q_at, do, do_at, ds, ds_at, k, v)

    @inlined
    def ds_row(query, lse, delta, tiles, first_y, needs_mask, arrays, strides, sizes, score):
        """The thread's row of dS <- lines 5 to 8. -> the sum of dS times the score's derivative by an option that is
        one number for each head (Stage.by_head), or 0."""
        s_part = local.array(at_once, compute)  # (at_once,)
        dp_part = local.array(at_once, compute)  # (at_once,)
        share = compute(0)
        for y in range(0, config.tile_n, at_once):
            dot_k(s_part, tiles.q, tiles.q_at, tiles.k, y * config.k_row)  # S = Q K^T
            dot_v(dp_part, tiles.do, tiles.do_at, tiles.v, y * config.v_row)  # dP = dO V^T
            for u in range(at_once):
                k_index = first_y + y + u
                ds = compute(0)
                if query.first_key <= k_index and k_index < query.end_key:
                    at = at_key(query, k_index)
                    p, derivative = scores.weight(s_part[u], lse, at, needs_mask, arrays, strides, score)
                    if p != 0:  # otherwise dP may be NaN or Inf, for a key that is not seen
                        factor = scores.weight_factor(at, arrays, sizes, score)
                        dp = dp_part[u] * factor if factor != 0 else compute(0)  # no NaN from a weight of 0
                        ds = p * (dp - delta)
                        if has_number:
                            share += ds * number_derivative(at)
                        if of_product:
                            ds *= derivative
                tiles.ds[tiles.ds_at + y + u] = ds
                if products_at:
                    tiles.ds[tiles.ds_at + products_at + y + u] = s_part[u]
        return share

    @inlined
    def over_keys(sums, tiles, sequence, h, first_row, first_j, end_j, arrays, strides, sizes, score):
        """Calls `use` for each key tile of [first_j, end_j) that some row of the query tile sees.

        sums: what `use` adds to. -> the thread's share of the gradient of a number of the head.
        """
        thread, h_kv = cuda.threadIdx.x, kv_head(h, sizes)
        cuda.syncthreads()  # everyone is done with the tiles before
        # line 1: load Q_i, dO_i
        load_q(tiles.q, arrays.q, strides.q, sequence, h, first_row, thread)
        load_do(tiles.do, arrays.do, strides.do, sequence, h, first_row, thread)

        # line 2: this thread's row k, the keys that it sees, and its lse and delta
        q_index = first_row + thread
        query = query_of(sequence, h, q_index, sizes)
        lse_at = lse_row(sequence, h, min(q_index, sequence.seqlen_q - 1), sizes)
        lse, delta = arrays.lse[lse_at], arrays.delta[lse_at]
        share = compute(0)

        # line 3: the tiles that some row of the block sees
        last_row = min(first_row + config.tile_m, sequence.seqlen_q) - 1
        begin, _, _, end = key_range(sequence, first_row, last_row, sizes, config.tile_n)
        mask_row = walk.row(sequence.b, h, first_row, arrays, strides)
        for j in range(max(begin, first_j), min(end, end_j)):
            if not walk.is_nonempty(mask_row, j, arrays, strides):  # mask_mod removes all of the tile
                continue
            needs_mask = walk.needs_mask(mask_row, j, arrays, strides) if walk.present else TRUE
            cuda.syncthreads()  # line 4: everyone is done with the tiles before
            first_y = j * config.tile_n
            load_k(tiles.k, arrays.k, strides.k, sequence, h_kv, first_y, thread)
            load_v(tiles.v, arrays.v, strides.v, sequence, h_kv, first_y, thread)
            cuda.syncthreads()
            if q_index < sequence.seqlen_q:
                # lines 5 to 8: dS[k, :] = P[k, :] * (dO_i[k, :] V_j^T - delta[k])
                share += ds_row(query, lse, delta, tiles, first_y, needs_mask, arrays, strides, sizes, score)
                use(sums, query, tiles, first_y, arrays, strides, sizes, score)
        return share

    return named(query_tile, row_tiles, over_keys)
