"""dS of one query row over a key tile, from which dQ, dbias and the gradients of numbers of heads are computed."""

from typing import Any, NamedTuple

from ...ptx import local
from ..score import At, by_head, weights
from ..score import make as make_score
from . import elements, rows
from .inlined import inlined


class Row(NamedTuple):
    """A thread's query, the keys [first_key, end_key) that it sees, and what the forward stored for it."""

    b: int
    h: int
    q_index: int
    q_pos: int
    first_key: int
    end_key: int
    lse: float
    delta: float


class RowTiles(NamedTuple):
    """Tiles in shared memory, and where the thread's own row begins in those of Q, dO and dS."""

    q: Any
    q_at: int
    do: Any
    do_at: int
    ds: Any
    ds_at: int
    k: Any
    v: Any


def make(config, of_product, products_at=0):
    """-> ds_row, a device function.

    of_product: dS is the gradient of scale * q . k, so it includes the derivative of all stages after the product;
    otherwise it is the gradient of the finished score. products_at: if q . k is stored, too, how far after dS.
    """
    compute = elements.COMPUTE_TYPES[config.dtype]
    of_number = by_head(config)
    has_number = of_number is not None
    weight, count = weights.make(config), make_score(config).count
    at_once = rows.at_once(config.tile_n, config.dtype)
    dot_k, dot_v = rows.dots(config.k_row, at_once, compute(0)), rows.dots(config.v_row, at_once, compute(0))

    @inlined
    def ds_row(row, tiles, first_y, asks, arrays, strides, sizes, score):
        """tiles.ds[tiles.ds_at ...] (tile_n,) <- dS of the keys from first_y on, 0 for keys that are not seen. asks:
        whether mask_mod removes some of them.

        Returns the tile's share of the gradient of an option that is one number for each head (Stage.by_head): the sum
        of dS times the score's derivative by that number.
        """
        s_part = local.array(at_once, compute)  # (at_once,)
        dp_part = local.array(at_once, compute)  # (at_once,)
        share = compute(0)
        for y in range(0, config.tile_n, at_once):
            dot_k(s_part, tiles.q, tiles.q_at, tiles.k, y * config.k_row)  # S = Q K^T
            dot_v(dp_part, tiles.do, tiles.do_at, tiles.v, y * config.v_row)  # dP = dO V^T
            for u in range(at_once):
                k_index = first_y + y + u
                ds = compute(0)
                if row.first_key <= k_index and k_index < row.end_key:
                    at = At(row.b, row.h, row.q_index, k_index, row.q_pos)
                    p, derivative = weight(s_part[u], row.lse, at, asks, arrays, strides, score)
                    if p != 0:  # otherwise dP may be NaN or Inf, for a key that is not seen
                        counts = count(at, arrays, sizes, score)
                        dp = dp_part[u] * counts if counts != 0 else compute(0)  # no NaN if the weight does not count
                        ds = p * (dp - row.delta)
                        if has_number:
                            share += ds * of_number(at)
                        if of_product:
                            ds *= derivative
                tiles.ds[tiles.ds_at + y + u] = ds
                if products_at:
                    tiles.ds[tiles.ds_at + products_at + y + u] = s_part[u]
        return share

    return ds_row
