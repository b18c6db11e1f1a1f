"""What a consumer reads of a work tile, which the scheduler has written to shared memory (producer.py)."""

from numba import int32, int64, uint32

from ...ptx import ld_st, shfl
from ..steps.inlined import inlined
from ..steps.query_tile import QueryTile
from .barriers import FIRST_QUERY, POS_HIGH, POS_LOW, B, H

load_shared, idx_b32 = ld_st.load_b32, shfl.idx_b32


@inlined
def word(place):
    """A word of a work tile. As one lane's it is known to be the same in all, and so is what hangs on it: ptxas keeps
    descriptors and counts in uniform registers only where it knows that a warp stays together."""
    return int32(idx_b32(load_shared(int32(place)), 0))


@inlined
def position(work_tile):
    """Of the query tile's first query; 64 bits, since an offset may lie anywhere."""
    return int64(word(work_tile + POS_HIGH)) << int64(32) | int64(uint32(word(work_tile + POS_LOW)))


@inlined
def tile_of(work_tile):
    """The QueryTile that a work tile describes."""
    return QueryTile(word(work_tile + B), word(work_tile + H), word(work_tile + FIRST_QUERY), int32(0))
