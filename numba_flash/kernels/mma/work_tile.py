"""Which tile a block owns: of queries of one head, or of keys of one KV head. Tiles that take longest come first.

Under a causal mask the last queries of a head see the most keys, and the first keys are seen by the most queries.
"""

from typing import Any, NamedTuple

from numba import int32

from ...ptx import special
from ..steps import sequence
from ..steps.inlined import inlined
from ..steps.integers import divide, tiles_of
from ..steps.query_tile import QueryTile


class QueryWork(NamedTuple):
    """A tile of queries of head h, or of the heads from h on that share it. part: which columns of O, if blocks share
    them."""

    sequence: Any
    h: int
    h_kv: int
    first_query: int
    part: int


class KeyWork(NamedTuple):
    """A tile of keys of KV head h_kv."""

    sequence: Any
    h_kv: int
    first_key: int


@inlined
def query_tile(work):
    """-> the QueryTile of a QueryWork."""
    return QueryTile(work.sequence.b, work.h, work.first_query, work.part)


def of_queries(config, queries, parts=1):
    """-> work_of(block, arrays, strides, sizes), a device function: QueryWork. queries: in a tile, of each head;
    parts: how many blocks share the columns of O."""
    group, sequence_of = config.group_size, sequence.make(config)

    @inlined
    def work_of(block, arrays, strides, sizes):
        tiles = divide(block, parts)
        part = int32(block - tiles * parts)
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


def of_keys(config):
    """-> work_of(block, arrays, strides, sizes), a device function: KeyWork."""
    tile_n, sequence_of = config.tile_n, sequence.make(config)

    @inlined
    def work_of(block, arrays, strides, sizes):
        n_tiles = tiles_of(sizes.seqlen_k, tile_n)
        head_tiles = divide(block, n_tiles)
        b, own = divide(head_tiles, sizes.heads_kv), block - head_tiles * n_tiles
        h_kv = head_tiles - b * sizes.heads_kv
        return KeyWork(sequence_of(b, arrays, strides, sizes), int32(h_kv), int32(own * tile_n))

    return work_of
