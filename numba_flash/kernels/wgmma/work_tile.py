"""How a consumer reads a work tile, which the scheduler has written to shared memory (query_tiles.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, int64, uint32

from ...ptx import ld_st, shfl, special
from ..score import dropout
from ..steps.inlined import inlined
from ..steps.plain import first_column_of, first_row_of
from ..steps.query_tile import QueryTile
from .barriers import FIRST_QUERY, POS_HIGH, POS_LOW, B, H

load_shared, idx_b32 = ld_st.load_b32, shfl.idx_b32


@inlined
def word(place):
    """A word of a work tile. It is broadcast from one lane, so ptxas knows that it is uniform, and with it what depends
    on it. Only then does it keep descriptors and counts in uniform registers."""
    return int32(idx_b32(load_shared(int32(place)), 0))


@inlined
def position(work_tile):
    """Position of the query tile's first query; 64 bits, because an offset may be any number."""
    return int64(word(work_tile + POS_HIGH)) << int64(32) | int64(uint32(word(work_tile + POS_LOW)))


@inlined
def tile_of(work_tile):
    """The QueryTile that a work tile describes."""
    return QueryTile(word(work_tile + B), word(work_tile + H), word(work_tile + FIRST_QUERY), int32(0))


@inlined
def rows_of_lane():
    """-> (the warp's first row in the query tile, lane). Computed again on each call, to save registers."""
    thread = special.thread_index() - 128
    return (thread >> int32(5)) * 16, thread & int32(31)


class Counting(NamedTuple):
    """Which weights of a query tile count, and how often. Device functions, to be called if `drops`."""

    drops: bool
    words: int  # of `kept`
    find: Callable[..., Any]
    drop: Callable[..., Any]  # (acc_s, kept): P <- 0 if it does not count
    scale: Callable[..., Any]  # (inverse_l, score): inverse_l <- with how often the others count


def counting(config):
    """-> Counting, for tiles of config.tile_n keys."""
    drops, kept_words, kept_of, _, drop, scale = dropout.on_fragments(config, 1, config.tile_n)

    @inlined
    def find_kept(j, work_tile, kept, arrays, sizes):
        """kept <- which weights of key tile j count. It needs no score."""
        first_row, lane = rows_of_lane()
        b, h, lane_row = word(work_tile + B), word(work_tile + H), first_row + first_row_of(lane)
        first_key = int32(j * config.tile_n + first_column_of(lane))
        kept_of(kept, first_key, b, h, lane_row, position(work_tile), arrays, sizes)

    return Counting(drops, kept_words, find_kept, drop, scale)
