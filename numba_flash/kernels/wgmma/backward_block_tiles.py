"""Which key tiles a block of wgmma/backward_fused processes, and how its roles learn of them.

With config.stays a block processes one tile after another. The thread that loads Q takes the next tile when the last Q
of this one has been issued. It describes the tile in one of two states (pipeline.py), which alternate. The other
roles read the state and report when they have finished with it. A state without members ends all roles. Without
config.stays a block has one tile, and its state is written before any role begins.

Tiles are taken by tickets. A part of dQ waits only for parts of tiles with lower tickets (kernels/steps/dq_order.py).
Of all unfinished tiles, the one with the lowest ticket waits for none. Its block took the earlier tiles with lower
tickets, which are finished, so the block is working on it. So every wait ends, however many blocks a GPU runs at a
time. With config.key_tiles no block waits for another and there are no tickets: the block's number gives its heads.
"""

from numba import int32, uint32

from ...ptx import memory, special
from ..steps import tile_numbers
from ..steps.basics import divide, inlined, key_tile_of, named, ways_of
from ..steps.sequence import make as make_sequence
from . import backward_work, block, pipeline
from .backward_work import head_parts_of, kv_head_of
from .block import MEMBERS, STEP


def make(config):
    """-> device functions. w: the number of a tile among those of the block. has_tile is for one thread,
    warp_has_tile for a whole warp."""
    tile_n, stays, ring = config.tile_n, config.stays, pipeline.of_backward(config).state
    all_keys, own_tiles = config.key_tiles > 0, max(config.key_tiles, 1)
    work = backward_work.of_keys(config)
    state = block.state_of(config)
    numbers = tile_numbers.make(config, tile_n, True) if config.packed else None
    nonfinite = block.nonfinite_word(config)
    sequence_of, has_seqlens_k = make_sequence(config), config.has("seqlens_k")
    complete = tile_numbers.completer(config, True) if config.packed else None

    @inlined
    def state_of(base, w):
        """Shared address of the state of the block's w-th tile: the base, moved."""
        return base + (w & (config.states - 1)) * config.state_bytes

    @inlined
    def number_of(w, arrays):
        """The ticket of the block's w-th tile; with config.key_tiles, the number of its head among all heads."""
        if all_keys:
            return int32(special.block_index() + divide(w, own_tiles) * special.block_count())
        return int32(memory.add(memory.address(arrays.turns, 0), uint32(1)))

    @inlined
    def tiles_of(sizes):
        """-> (parts of all groups, numbered key tiles of each part)."""
        all_parts = int32(int32(sizes.batch) * head_parts_of(sizes, config.members))
        return all_parts, int32(1) if all_keys else divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n)

    @inlined
    def work_of(number, w, n_tiles, sizes):
        """-> (b, part of all groups, key tile, step). The last key tile of a head comes first."""
        head_parts = head_parts_of(sizes, config.members)
        if all_keys:
            b = divide(number, head_parts)
            j = own_tiles - 1 - (w - divide(w, own_tiles) * own_tiles)
            part = int32(number - b * head_parts)
            step = int32(1)
            if config.packed:  # as in take_of_packed: dK and dV have the same bits
                both = ways_of(head_parts, int32(0), sizes.left, sizes.right) == 2
                step = int32(-1) if both and part & int32(1) != 0 else int32(1)
            return b, part, int32(j), step
        ways = int32(ways_of(head_parts, n_tiles, sizes.left, sizes.right))
        return key_tile_of(number, int32(sizes.batch), head_parts, n_tiles, ways, int32(sizes.heads_in_flight))

    @inlined
    def own_keys(arrays, strides, sizes):
        """-> (first row of K and V, head, batch entry) of a block that has all keys of a head in one tile."""
        all_parts, n_tiles = tiles_of(sizes)
        b, part, _, _ = work_of(number_of(int32(0), arrays), int32(0), n_tiles, sizes)
        sequence = sequence_of(int32(b), arrays, strides, sizes)
        return int32(sequence.first_key), kv_head_of(int32(part), sizes, config.members), int32(sequence.entry)

    @inlined
    def take(base, w, arrays, strides, sizes):
        """One thread takes the w-th tile and writes its state; the state has no members if no tile is left."""
        own, number = state_of(base, w), number_of(w, arrays)
        all_parts, n_tiles = tiles_of(sizes)
        if not stays or number < all_parts * n_tiles:
            b, part, j, step = work_of(number, w, n_tiles, sizes)
            sequence = sequence_of(int32(b), arrays, strides, sizes)
            work.write_tile(own, sequence, int32(part), int32(j * tile_n), arrays, strides, sizes)
            state.write(own, STEP, step)
            if all_keys:
                state.write(own, nonfinite, 0)
        else:
            state.write(own, MEMBERS, 0)

    @inlined
    def take_of_packed(base, w, arrays, strides, sizes):
        """take for packed sequences. They follow each other, and each has a ticket for each head and number of a tile.
        Tickets behind its last tile are passed over."""
        own, all_numbers, head_parts = state_of(base, w), numbers.count(sizes), head_parts_of(sizes, config.members)
        # The number of tiles may decide nothing that changes the order of a sequence's sums.
        ways, looking = int32(ways_of(head_parts, int32(0), sizes.left, sizes.right)), True
        while looking:
            ticket, busy = number_of(w, arrays), special.opaque(int32(sizes.heads_in_flight))
            looking = ticket < int32(head_parts * all_numbers)
            if not looking:
                state.write(own, MEMBERS, 0)
            else:
                b, first_row, rows = numbers.sequence(divide(ticket, head_parts), arrays, strides, sizes)
                keys = rows
                if has_seqlens_k and rows > 0:
                    keys = int32(complete(b, first_row, rows, arrays, strides, sizes).keys)
                n_tiles = divide(keys + int32(tile_n - 1), tile_n)
                ticket = int32(ticket - numbers.first(b, first_row) * head_parts)
                looking = ticket >= int32(head_parts * n_tiles)
                if not looking:
                    in_flight = divide(busy + n_tiles - int32(1), n_tiles)
                    _, part, j, step = key_tile_of(ticket, int32(1), head_parts, n_tiles, ways, in_flight)
                    sequence = complete(b, first_row, rows, arrays, strides, sizes)
                    work.write_tile(own, sequence, int32(part), int32(j * tile_n), arrays, strides, sizes)
                    state.write(own, STEP, step)

    def has_tile_by(read):
        @inlined
        def has_tile(base, w):
            """Whether the block has a w-th tile. Waits until the state is written."""
            if not stays:
                return w == 0
            ring.consumer_wait(base, w)
            return read(state_of(base, w), MEMBERS) > 0

        return has_tile

    take_next = take_of_packed if config.packed and not all_keys else take
    has_tile, warp_has_tile = has_tile_by(state.read_alone), has_tile_by(state.read)

    @inlined
    def next_tile(base, w, arrays, strides, sizes):
        """The thread that writes the state calls this in place of has_tile."""
        if stays:
            ring.producer_acquire(base, w)
            take_next(base, w, arrays, strides, sizes)
            ring.producer_commit(base, w, True)
        return has_tile(base, w)

    @inlined
    def leave(base, w):
        """A thread says that it has read the state of the w-th tile for the last time."""
        if stays:
            ring.consumer_release(base, w, True)

    return named(state_of, own_keys, take, next_tile, leave, has_tile=has_tile, warp_has_tile=warp_has_tile)
