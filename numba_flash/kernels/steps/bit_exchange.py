"""One step of a transposition of bits that lie in the words of a warp's lanes."""

from numba import uint32

from ...ptx import shfl
from .basics import inlined


@inlined
def exchange(own, lane_bit, distance, keep, shift):
    """-> own, merged with bits of the lane `distance` away, which differs in lane_bit. The place of a bit and lane_bit
    exchange their meanings. keep: the places with lane_bit set; shift: the distance of places."""
    came = shfl.bfly_b32(own, distance)
    came = uint32(came << uint32(shift)) if lane_bit == 0 else uint32(came >> uint32(shift))
    own_places = uint32(keep ^ 0xFFFFFFFF) if lane_bit == 0 else uint32(keep)
    return uint32((own & own_places) | (came & ~own_places))
