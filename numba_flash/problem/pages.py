"""Pages: what a Problem knows of the cache in which its keys lie (kvcache.py)."""

from typing import NamedTuple


class Pages(NamedTuple):
    """size: keys of a page; total: pages of the pool; capacity: the most keys that a sequence has room for."""

    size: int
    total: int
    capacity: int
