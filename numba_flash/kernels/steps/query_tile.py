"""The query tile that a block, or a consumer, processes."""

from typing import Any, NamedTuple


class QueryTile(NamedTuple):
    """b, h: the batch entry and the first query head. part: which columns of O, if blocks share them."""

    b: int
    h: int
    first_query: int
    part: int


class QueryWork(NamedTuple):
    """The same with the sequence that it is of, and the head of K and V."""

    sequence: Any
    h: int
    h_kv: int
    first_query: int
    part: int
