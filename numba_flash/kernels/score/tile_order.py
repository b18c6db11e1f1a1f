"""The order in which a kernel takes its tiles under a mask_mod: the tile that loops over the most other tiles first.

It runs after tile_states, whose words give these numbers. After the words of a head's r-th tile it writes the number of
the tile that is taken r-th. Among equals the order is that without a mask_mod: the last query tile first, or the first
key tile, because under a causal mask these see the most. No result depends on the order.

    rank of a tile = the number of tiles that are longer, or equally long and taken sooner

A block counts the tiles of a head, config.threads of them at a time. Each of its threads counts the rank of its own
tile. Launch: grid (batch * heads, as far as they differ, * blocks for a head), block (config.threads).
"""

from numba import cuda, int32, uint32

from ...abi.parameters import STATES_IN_WORD
from ...ptx import bits, special
from ..steps.basics import divide, tiles_of
from . import tile_walk


def make(config):
    threads, own_rows, of_keys = config.threads, config.tile.own, config.tile.of_keys
    states_of, ones = tile_walk.states_of(config), bits.count

    @cuda.jit
    def tile_order(arrays, strides, sizes):
        thread = special.thread_index()
        states, by = states_of(arrays, strides)
        words = int32(by[2] - 1)
        tiles = tiles_of(sizes.seqlen_k if of_keys else sizes.seqlen_q, own_rows)
        blocks = tiles_of(tiles, threads)  # blocks of each head
        head = divide(special.block_index(), blocks)
        row = int32(head * tiles * by[2])
        own_chunk = int32(special.block_index() - head * blocks)
        own, mine = int32(own_chunk * threads + thread), int32(0)
        counts = cuda.shared.array(threads, int32)

        rank = int32(0)
        # The block's own tiles come first: afterwards it knows how long they are.
        for step in range(blocks):
            chunk = own_chunk if step == 0 else int32(step - 1 if step <= own_chunk else step)
            tile, count = int32(chunk * threads + thread), int32(0)
            if tile < tiles:
                for number in range(words):
                    count += ones(uint32(states[row + tile * by[2] + number]) & uint32((1 << STATES_IN_WORD) - 1))
            counts[thread] = count
            if step == 0:
                mine = count
            cuda.syncthreads()
            for place in range(min(threads, tiles - chunk * threads)):
                other, sooner = counts[place], int32(chunk * threads + place) < own
                if other > mine or (other == mine and (sooner if of_keys else int32(chunk * threads + place) > own)):
                    rank += int32(1)
            cuda.syncthreads()
        if own < tiles:
            states[row + rank * by[2] + words] = uint32(own)

    return tile_order
