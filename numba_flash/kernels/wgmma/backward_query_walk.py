"""Which query tiles a block of a wgmma backward that owns keys loops over: those that see its keys, for each query head
of the group. The last tile of a head comes first, and the heads follow each other. With config.bidirectional the word
STEP gives the direction, and each tile of all heads comes before the next tile.

Under a mask_mod only tiles in which some key is seen are visited. The producer's threads and the consumers each find
them from the same words, so they agree. The next head's own mask_mod may leave out others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32

from ..score import tile_walk
from ..steps.inlined import inlined
from . import block
from .block import BEGIN, FIRST_ROW, MEMBERS, STEP, STOP, B, H


class QueryWalk(NamedTuple):
    """Device functions. work: where the words are; i: the query tile; member: index of the head in its group, the
    number of heads when no tile is left."""

    present: bool  # whether tiles in which nothing is seen are left out
    first: Callable[..., Any]  # (work, arrays, strides) -> (i, member)
    more: Callable[..., Any]  # (work, i, member) -> whether this tile is one of them
    next: Callable[..., Any]  # (work, i, member, arrays, strides) -> (i, member)
    needs_mask: Callable[..., Any]  # (work, i, member, arrays, strides) -> whether mask_mod decides there


@inlined
def first_tile(begin, stop, step):
    return int32(stop - 1 if step < 0 else begin)


@inlined
def following_tile(i, member, step, members):
    """-> (i, member) with config.bidirectional. Blocks that are some tiles apart stay so, even if some have more tiles
    than others."""
    member = int32(member + 1)
    if member == members:
        i, member = int32(i + step), int32(0)
    return i, member


def make(config, whole_warp):
    """whole_warp: all lanes of a warp call these functions together, and the compiler may rely on it."""
    walk, bidirectional = tile_walk.make(config, whole_warp), config.bidirectional
    words = block.words(config.shared_layout().state)
    word = words.read if whole_warp else words.read_alone

    @inlined
    def states_of(work, member, arrays, strides):
        return walk.row(word(work, B), int32(word(work, H) + member), word(work, FIRST_ROW), arrays, strides)

    @inlined
    def up_to(work, i, member, arrays, strides):
        """-> the first tile from i on in which something is seen."""
        begin, members = word(work, BEGIN), word(work, MEMBERS)
        found = walk.last(states_of(work, member, arrays, strides), i, begin, arrays, strides)
        while found < begin and member < members:
            member = int32(member + 1)
            if member < members:
                states = states_of(work, member, arrays, strides)
                found = walk.last(states, int32(word(work, STOP) - 1), begin, arrays, strides)
        return found, member

    @inlined
    def first(work, arrays, strides):
        if bidirectional:
            i = first_tile(word(work, BEGIN), word(work, STOP), word(work, STEP))
        else:
            i = int32(word(work, STOP) - 1)
        member = int32(0)
        if walk.present:
            i, member = up_to(work, i, member, arrays, strides)
        return i, member

    @inlined
    def more(work, i, member):
        return member < word(work, MEMBERS) and word(work, BEGIN) <= i < word(work, STOP)

    @inlined
    def following(work, i, member, arrays, strides):
        if bidirectional:
            i, member = following_tile(i, member, word(work, STEP), word(work, MEMBERS))
        elif walk.present:
            i, member = up_to(work, int32(i - 1), member, arrays, strides)
        else:
            i = int32(i - 1)
            if i < word(work, BEGIN):
                i, member = int32(word(work, STOP) - 1), int32(member + 1)
        return i, member

    @inlined
    def needs_mask(work, i, member, arrays, strides):
        return walk.needs_mask(states_of(work, member, arrays, strides), i, arrays, strides)

    return QueryWalk(walk.present, first, more, following, needs_mask)
