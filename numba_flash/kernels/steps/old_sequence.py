"""Where a batch entry's rows are, and which tiles of them a block visits.

Every address of a row of lse is `lse_row`, every range of tiles is `key_range` or `query_range`. What these take of a
batch entry (how many keys are valid, the position of its query 0) comes from kernels/score/positions.py.
"""

from .inlined import inlined
from .plain import key_queries, key_tiles, row_keys


@inlined
def lse_row(b, h, q_index, sizes):
    """Index of a query's lse, of its delta and of all else that has one number for a query: (batch, heads,
    seqlen_q)."""
    return (b * sizes.heads + h) * sizes.seqlen_q + q_index


@inlined
def key_range(first_pos, last_pos, keys, sizes, tile_n):
    """The tiles of `tile_n` keys that queries at positions first_pos to last_pos see, as in ranges.key_tiles.

    -> (begin, free, cut, stop): a query sees some of the tiles [begin, stop), and all of them see [free, cut) whole.
    keys: the number of valid keys.
    """
    first_begin, first_end = row_keys(first_pos, sizes.left, sizes.right, keys)
    last_begin, last_end = row_keys(last_pos, sizes.left, sizes.right, keys)
    return key_tiles(first_begin, first_end, last_begin, last_end, tile_n)


@inlined
def query_range(first_key, last_key, q_start, sizes, tile_m):
    """The tiles of `tile_m` queries that see keys first_key to last_key: `key_range` from the keys' side. q_start: the
    position of query 0."""
    first_begin, first_end = key_queries(first_key, q_start, sizes.left, sizes.right, sizes.seqlen_q)
    last_begin, last_end = key_queries(last_key, q_start, sizes.left, sizes.right, sizes.seqlen_q)
    return key_tiles(first_begin, first_end, last_begin, last_end, tile_m)
