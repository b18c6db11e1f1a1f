"""The query tile that a block, or a consumer, processes."""

from typing import NamedTuple


class QueryTile(NamedTuple):
    """b, h: the batch entry and the first query head. part: which columns of O, if blocks share them."""

    b: int
    h: int
    first_query: int
    part: int
