"""Which query tiles a key tile of a wgmma backward loops over under a mask_mod: those in which some key is seen.

The producer's threads and the consumers each find them from the same words, so they agree. Tiles of a head come from
the last to the first, then those of the group's next head, whose own mask_mod may leave out others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32

from ...ptx import ld_st
from ..score import tile_walk
from ..steps.inlined import inlined
from . import backward_state
from .backward_state import BATCH, BEGIN, FIRST_ROW, HEAD, MEMBERS, STOP


class QueryWalk(NamedTuple):
    """Device functions. member: index of the head in its group; when no tile is left, the number of heads."""

    present: bool  # otherwise the loop has every tile
    up_to: Callable[..., Any]  # (base, i, member, arrays, strides) -> (i, member) of the first tile from i on
    asks: Callable[..., Any]  # (base, i, member, arrays, strides) -> whether mask_mod decides there


def make(config, whole_warp):
    """whole_warp: all lanes of a warp call these functions together, and the compiler may rely on it."""
    walk = tile_walk.make(config, whole_warp)
    state, load_b32 = config.shared_layout().state, ld_st.load_b32
    _, _, _, word_of_warp, _ = backward_state.make(config)

    @inlined
    def word_of_thread(base, which):
        return int32(load_b32(int32(base + state + which)))

    word = word_of_warp if whole_warp else word_of_thread

    @inlined
    def states_of(base, member, arrays, strides):
        h = int32(word(base, HEAD) + member)
        return walk.row(word(base, BATCH), h, word(base, FIRST_ROW), arrays, strides)

    @inlined
    def up_to(base, i, member, arrays, strides):
        begin, members = word(base, BEGIN), word(base, MEMBERS)
        found = walk.last(states_of(base, member, arrays, strides), i, begin, arrays, strides)
        while found < begin and member < members:
            member = int32(member + 1)
            if member < members:
                states = states_of(base, member, arrays, strides)
                found = walk.last(states, int32(word(base, STOP) - 1), begin, arrays, strides)
        return found, member

    @inlined
    def asks(base, i, member, arrays, strides):
        return walk.needs_mask(states_of(base, member, arrays, strides), i, arrays, strides)

    return QueryWalk(walk.present, up_to, asks)
