"""The query tile that a block, or a consumer, processes, and the keys that it loops over."""

from typing import NamedTuple


class QueryTile(NamedTuple):
    """b, h: the batch entry and the first query head. part: which columns of O, if blocks share them."""

    b: int
    h: int
    first_query: int
    part: int


class TileKeys(NamedTuple):
    """h_kv: the KV head. keys: how many are valid. position: of query first_query among the keys."""

    h_kv: int
    keys: int
    position: int
