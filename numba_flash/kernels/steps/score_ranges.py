"""Which tiles of scores a block computes one after the other, where it sums up dS for bias or aux."""

from typing import NamedTuple

from numba import int32, int64

from .basics import divide, inlined, named, tiles_of


class Range(NamedTuple):
    """Units [unit, end_unit) of a box of query tiles, and the half-open range of key tiles in each. A unit is one query
    tile of one head of one batch entry; the box has `heads` heads of `tiles` query tiles each, from (b, h, i) on."""

    b: int
    h: int
    i: int
    heads: int
    tiles: int
    unit: int
    end_unit: int
    j: int
    end_j: int


@inlined
def place_of(unit, within):
    """-> (b, h, i) of a unit of a Range."""
    head_of_all = divide(unit, within.tiles)
    entry = divide(head_of_all, within.heads)
    h, i = int32(within.h + head_of_all - entry * within.heads), int32(within.i + unit - head_of_all * within.tiles)
    return int32(within.b + entry), h, i


@inlined
def place_after(b, h, i, within):
    """-> (b, h, i) of the unit behind the one at (b, h, i), without a division."""
    i = int32(i + 1)
    if i >= int32(within.i + within.tiles):
        i, h = int32(within.i), int32(h + 1)
        if h >= int32(within.h + within.heads):
            h, b = int32(within.h), int32(b + 1)
    return int32(b), int32(h), int32(i)


def of_bias(config):
    """-> device functions of a kernel whose blocks own tiles of bias' own elements.

    A tile is read by the scores of all batch entries and heads that share a bias, of all query tiles if all queries
    share a row (rows_summed), and of all key tiles if all keys share a column (keys_summed). With config.split several
    blocks share a tile: each has a part of the units, and dbias_sum.py adds up what they store.
    """

    @inlined
    def own_range(block, sizes):
        """-> (the Range of the scores that read the block's tile, which part of them the block has)."""
        shape = sizes.dbias_shape
        m_tiles = tiles_of(sizes.seqlen_q, config.tile_m)
        n_tiles = tiles_of(sizes.seqlen_k, config.tile_n)
        own_m, own_n = (int32(1) if config.rows_summed else m_tiles), (int32(1) if config.keys_summed else n_tiles)
        above = divide(block, own_n)
        j, i = int32(block - above * own_n), int32(above - divide(above, own_m) * own_m)
        above = divide(above, own_m)
        split = divide(above, int32(shape[0] * shape[1])) if config.split else int32(0)
        above = int32(above - split * int32(shape[0] * shape[1]))
        b = divide(above, shape[1])
        h = int32(above - b * int32(shape[1]))
        entries, heads = (int64(1) if shape[0] > 1 else sizes.batch), (int64(1) if shape[1] > 1 else sizes.heads)
        row_tiles = m_tiles if config.rows_summed else int32(1)
        units, splits = entries * heads * row_tiles, sizes.dbias_splits if config.split else int64(1)
        unit, end_unit = int32(split * units // splits), int32((split + 1) * units // splits)
        end_j = n_tiles if config.keys_summed else int32(j + 1)
        return Range(b, h, i, int32(heads), row_tiles, unit, end_unit, j, end_j), split

    @inlined
    def target_of(own, split, arrays, strides, sizes):
        """-> (where the block stores its sums, its strides, the element index of the Range's batch entry and head)."""
        target, by, base = arrays.dbias, strides.dbias, int64(0)
        if config.split:
            shape = sizes.dbias_shape
            of_head = shape[2] * shape[3]
            target, by = arrays.dbias_sums, (shape[1] * of_head, of_head, shape[3], int64(1))
            base = split * shape[0] * by[0]
        return target, by, base + (own.b * by[0] + own.h * by[1])

    return named(own_range, target_of)
