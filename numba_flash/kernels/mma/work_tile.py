"""Which tile a block owns: of queries of one head, or of keys of one KV head. Tiles that take longest come first.

Under a causal mask the last queries of a head see the most keys, and the first keys are seen by the most queries. Under
a mask_mod the order comes from kernels/score/longest_first.py.
"""

from typing import Any, NamedTuple

from numba import int32

from ...ptx import special
from ..score import longest_first
from ..steps import sequence, tile_numbers
from ..steps.basics import divide, inlined, tiles_of
from ..steps.sequence import QueryTile, QueryWork


class KeyWork(NamedTuple):
    """A tile of keys of KV head h_kv."""

    sequence: Any
    h_kv: int
    first_key: int


@inlined
def query_tile(work):
    """-> the QueryTile of a QueryWork."""
    return QueryTile(work.sequence.b, work.h, work.first_query, work.part)


@inlined
def part_of(block, parts):
    """The block's number among those that share the columns of O."""
    return int32(block - divide(block, parts) * parts)


def of_queries(config, queries, parts=1):
    """-> work_of(block, arrays, strides, sizes), a device function: QueryWork. queries: in a tile, of each head;
    parts: how many blocks share the columns of O."""
    group, sequence_of, longest = config.group_size, sequence.make(config), longest_first.make(config)
    if config.in_order:
        return numbered_queries(config, queries, parts)

    @inlined
    def work_of(block, arrays, strides, sizes):
        tiles = divide(block, parts)
        part = int32(block - tiles * parts)
        if longest.present:
            b, head, own = longest.take(tiles, arrays, strides, sizes)
        else:
            # Opaque: a kernel that asks twice would otherwise keep the number of tiles through its loop.
            heads, seqlen_q = divide(sizes.heads, group), special.opaque(int32(sizes.seqlen_q))
            m_tiles = tiles_of(seqlen_q, queries)
            head_tiles = divide(tiles, m_tiles)
            b, own = divide(head_tiles, heads), m_tiles - 1 - (tiles - head_tiles * m_tiles)
            head = head_tiles - b * heads
        h, first_query = int32(head * group), int32(own * queries)
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        return QueryWork(sequence_of(b, arrays, strides, sizes), h, h_kv, first_query, part)

    return work_of


def numbered(config, rows, of_keys):
    """-> find(t, heads, arrays, strides, sizes): (Sequence, head, tile) of the t-th tile of packed sequences, whose
    tiles of `rows` rows have numbers. They follow each other as elsewhere. If there is none, it is of no row."""
    numbers, complete = tile_numbers.make(config, rows, of_keys), tile_numbers.completer(config, of_keys)

    @inlined
    def find(t, heads, arrays, strides, sizes):
        heads, zero = int32(heads), int32(0)
        b, first, count = numbers.sequence(divide(t, heads), arrays, strides, sizes)
        tiles, t = tiles_of(count, rows), int32(t - numbers.first(b, first) * heads)
        if t >= heads * tiles:  # behind the last tile of a sequence, which has a number more than tiles
            b, first, count, tiles, t = zero, zero, zero, int32(1), zero
        head = divide(t, tiles)
        return complete(b, first, count, arrays, strides, sizes), head, int32(t - head * tiles)

    return find


def numbered_queries(config, queries, parts):
    find = numbered(config, queries, False)

    @inlined
    def work_of(block, arrays, strides, sizes):
        found, h, tile = find(divide(block, parts), sizes.heads, arrays, strides, sizes)
        from_last = max(tiles_of(found.seqlen_q, queries) - 1, 0) - tile
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        return QueryWork(found, h, h_kv, int32(from_last * queries), part_of(block, parts))

    return work_of


def numbered_keys(config):
    find = numbered(config, config.tile_n, True)

    @inlined
    def work_of(block, arrays, strides, sizes):
        found, h_kv, tile = find(block, sizes.heads_kv, arrays, strides, sizes)
        return KeyWork(found, h_kv, int32(tile * config.tile_n))

    return work_of


def of_keys(config):
    """-> work_of(block, arrays, strides, sizes), a device function: KeyWork."""
    tile_n, sequence_of, longest = config.tile_n, sequence.make(config), longest_first.make(config)
    if config.in_order:
        return numbered_keys(config)

    @inlined
    def work_of(block, arrays, strides, sizes):
        if longest.present:
            b, h_kv, own = longest.take(block, arrays, strides, sizes)
        else:
            n_tiles = tiles_of(sizes.seqlen_k, tile_n)
            head_tiles = divide(block, n_tiles)
            b, own = divide(head_tiles, sizes.heads_kv), block - head_tiles * n_tiles
            h_kv = head_tiles - b * sizes.heads_kv
        return KeyWork(sequence_of(b, arrays, strides, sizes), int32(h_kv), int32(own * tile_n))

    return work_of
