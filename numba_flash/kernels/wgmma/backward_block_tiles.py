"""Which tiles of keys a block of wgmma_backward_fused has, and how its roles hear of them.

With config.stays it has one tile after the other, as many as come to it. The thread that fetches Q takes the next one
when the last Q of this one is under way, and says what it is in one of two states (backward_state), which take turns.
The other roles read it there and say when they are done with it. A state without members ends them all. Without
config.stays a block has one tile, whose state is written before any role begins.

Tiles are taken by tickets, and a part of dQ waits for parts of tiles with lower tickets alone
(kernels/steps/dq_order.py). Of all tiles that are not done, the one with the lowest ticket waits for none. What its
block took before has lower tickets still, and is done, so the block is at it. So each wait ends, however many blocks a
GPU runs at a time. With config.key_tiles there are no waits for other blocks and no tickets: the block's number says
which heads it has.
"""

from typing import Any, NamedTuple

from numba import int32, uint32

from ...ptx import mbarrier, memory, special
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import key_tile_of, ways_of
from . import backward_key_work, backward_state
from .backward_state import MEMBERS, STEP, STRUCK


class BlockTiles(NamedTuple):
    """Device functions."""

    state_of: Any
    take: Any
    next_tile: Any
    has_tile: Any  # by one thread
    warp_has_tile: Any
    leave: Any


def make(config, of_word):
    """of_word: as in backward_keys."""
    tile_n, at, stays = config.tile_n, config.barriers(), config.stays
    states, state_bytes = config.states, config.state_bytes
    all_keys, own_tiles = config.key_tiles > 0, max(config.key_tiles, 1)
    wait, arrive, address, add = mbarrier.wait, mbarrier.arrive, memory.address, memory.add
    block_index, block_count = special.block_index, special.block_count
    head_parts_of, _, set_up_state = backward_key_work.make(config)
    put, _, word, _ = backward_state.words(config)

    @inlined
    def state_of(base, w):
        """Where the state of the block's w-th tile is: the base, moved."""
        return base + (w & (states - 1)) * state_bytes

    @inlined
    def number_of(w, arrays):
        """The ticket of the block's w-th tile, or with config.key_tiles the number of its head among all."""
        if all_keys:
            return int32(block_index() + divide(w, own_tiles) * block_count())
        return int32(add(address(arrays.turns, 0), uint32(1)))

    @inlined
    def tiles_of(sizes):
        """-> (parts of all groups, key tiles of each that have a number)."""
        all_parts = int32(int32(sizes.batch) * head_parts_of(sizes))
        return all_parts, int32(1) if all_keys else divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n)

    @inlined
    def work_of(number, w, n_tiles, sizes):
        """-> (b, part of all groups, key tile, step). The last key tile of a head comes first."""
        head_parts = head_parts_of(sizes)
        if all_keys:
            b = divide(number, head_parts)
            j = own_tiles - 1 - (w - divide(w, own_tiles) * own_tiles)
            return b, int32(number - b * head_parts), int32(j), int32(1)
        ways = int32(ways_of(head_parts, n_tiles, sizes.left, sizes.right))
        return key_tile_of(number, int32(sizes.batch), head_parts, n_tiles, ways, int32(sizes.heads_abreast))

    @inlined
    def take(base, w, arrays, strides, sizes):
        """The state of the block's w-th tile, by one thread; without members where there is none."""
        own, number = state_of(base, w), number_of(w, arrays)
        all_parts, n_tiles = tiles_of(sizes)
        if not stays or number < all_parts * n_tiles:
            b, part, j, step = work_of(number, w, n_tiles, sizes)
            set_up_state(own, int32(b), int32(part), int32(j * tile_n), arrays, strides, sizes)
            put(own, STEP, step)
            put(own, STRUCK, 0)
        else:
            put(own, MEMBERS, 0)

    def has_tile_by(read):
        @inlined
        def has_tile(base, w):
            """Whether the block has a w-th tile, once that is said."""
            if not stays:
                return w == 0
            wait(base + at.state_full + 8 * (w & 1), (w >> 1) & 1)
            return read(state_of(base, w), MEMBERS) > 0

        return has_tile

    has_tile, warp_has_tile = has_tile_by(of_word), has_tile_by(word)

    @inlined
    def next_tile(base, w, arrays, strides, sizes):
        """has_tile for the thread that says it."""
        if stays:
            wait(base + at.state_empty + 8 * (w & 1), ((w >> 1) & 1) ^ 1)
            take(base, w, arrays, strides, sizes)
            arrive(base + at.state_full + 8 * (w & 1))
        return has_tile(base, w)

    @inlined
    def leave(base, w):
        """A thread does not read the state of the w-th tile again."""
        if stays:
            arrive(base + at.state_empty + 8 * (w & 1))

    return BlockTiles(state_of, take, next_tile, has_tile, warp_has_tile, leave)
