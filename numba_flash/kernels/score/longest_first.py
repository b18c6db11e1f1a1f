"""Which tile a block takes under a mask_mod: of some heads at a time, those that loop over the most tiles first. So
blocks end together, however unequal the documents are. tile_order.py has found the order."""

from numba import int32

from ...arrays.dtypes import ITEM_SIZE
from ...config.forward import L2_BYTES
from ..steps.basics import divide, inlined, named, tiles_of
from ..steps.head_rounds import in_rounds
from . import tile_walk


def make(config):
    """-> take(t, arrays, strides, sizes) -> (b, head, own tile), b = batch if none is left; and whether it is
    `present`. head: the KV head for a kernel that owns keys; otherwise heads that share a tile count as one head."""
    if not config.tile_states:
        return named(take=_none, present=False)
    _, _, heads_in_tile, of_keys = config.states_tile
    own_rows, find = config.states_tile.own, tile_walk.states_of(config)
    l2_rows = L2_BYTES // (ITEM_SIZE[config.dtype] * (config.head_dim + config.head_dim_v))  # rows that a block reads

    @inlined
    def take(t, arrays, strides, sizes):
        group = divide(sizes.heads, sizes.heads_kv)
        own, walked = int32(sizes.seqlen_q), int32(sizes.seqlen_k)
        heads, sharing = divide(sizes.heads, heads_in_tile), divide(group, heads_in_tile)
        if of_keys:
            own, walked = int32(sizes.seqlen_k), int32(sizes.seqlen_q * group)
            heads, sharing = sizes.heads_kv, int32(1)
        tiles, head_tiles = tiles_of(own, own_rows), int32(sizes.batch * heads)
        at_once = int32(min(max(divide(l2_rows, max(walked, 1)), 1) * sharing, head_tiles))
        work = t < head_tiles * tiles
        head, rank = in_rounds(int32(t if work else 0), tiles, head_tiles, at_once)
        b = divide(head, heads)
        h = int32(head - b * heads)
        states, by = find(arrays, strides)
        row = int32(b * by[0] + (h * group if of_keys else h) * by[1] + rank * by[2])
        return int32(b if work else sizes.batch), h, int32(states[row + by[2] - 1])

    return named(take, present=True)


@inlined
def _none(t, arrays, strides, sizes):
    return int32(0), int32(0), int32(0)
