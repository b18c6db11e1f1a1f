"""Which tile a block owns: of queries of one head, or of keys of one KV head. Tiles that take longest come first.

Under a causal mask the last queries of a head see the most keys, and the first keys are seen by the most queries. Under
a mask_mod the order comes from kernels/score/longest_first.py.
"""

from typing import Any, NamedTuple

from numba import int32

from ...ptx import special
from ..score import longest_first
from ..steps import sequence, tile_numbers
from ..steps.inlined import inlined
from ..steps.integers import divide, tiles_of
from ..steps.query_tile import QueryTile, QueryWork


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
    """Which of the blocks that share the columns of O it is."""
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


def numbered_queries(config, queries, parts):
    """The same of packed sequences whose tiles have numbers. The heads of a group share each tile: its keys then come
    from the L2 cache."""
    numbers, complete = tile_numbers.make(config, queries, False), tile_numbers.completer(config, False)

    @inlined
    def work_of(block, arrays, strides, sizes):
        tile, m_tiles = divide(block, parts), numbers.count(sizes)
        of_group = int32(divide(sizes.heads, sizes.heads_kv))
        of_groups = divide(tile, of_group)
        h_kv = divide(of_groups, m_tiles)
        number = int32(m_tiles - 1 - (of_groups - h_kv * m_tiles))
        b, first, rows = numbers.sequence(number, arrays, strides, sizes)
        first_query = int32((number - numbers.first(b, first)) * queries) if rows > 0 else int32(0)
        h = int32(h_kv * of_group + tile - of_groups * of_group)
        found = complete(b if rows > 0 else int32(0), first, rows, arrays, strides, sizes)
        return QueryWork(found, h, h_kv, first_query, part_of(block, parts))

    return work_of


def numbered_keys(config):
    """The same as of_keys."""
    numbers, complete = tile_numbers.make(config, config.tile_n, True), tile_numbers.completer(config, True)

    @inlined
    def work_of(block, arrays, strides, sizes):
        n_tiles = numbers.count(sizes)
        h_kv = divide(block, n_tiles)
        number = int32(block - h_kv * n_tiles)
        b, first, rows = numbers.sequence(number, arrays, strides, sizes)
        first_key = int32((number - numbers.first(b, first)) * config.tile_n) if rows > 0 else int32(0)
        found = complete(b if rows > 0 else int32(0), first, rows, arrays, strides, sizes)
        return KeyWork(found, int32(h_kv), first_key)

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
