"""Which query tile a block, or a consumer, works on, and which keys it walks over."""

from typing import NamedTuple


class QueryTile(NamedTuple):
    """b, h: the batch entry and the first query head. part: which columns of O, where blocks share them."""

    b: int
    h: int
    first_query: int
    part: int


class TileKeys(NamedTuple):
    """h_kv: the KV head. keys: how many are valid. position: where query first_query stands among them."""

    h_kv: int
    keys: int
    position: int
