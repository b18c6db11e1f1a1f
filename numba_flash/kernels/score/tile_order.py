"""In which order a kernel takes its tiles under a mask_mod: the one that walks the most other tiles first.

It runs behind tile_states, whose words say how many these are. Behind the words of the r-th tile of a head it writes
the number of the tile that is the r-th to be taken. Of equal ones that comes first which would without a mask_mod: the
last tile of queries, the first one of keys, because under a causal mask they see the most. Nothing of a result depends
on the order.

    rank of a tile = how many tiles are longer, or as long and to be taken sooner

A block counts the tiles of a head, config.threads of them at a time, and each of its threads the rank of its own one.
Launch: grid (batch * heads, as far as they differ, * blocks for a head), block (config.threads).
"""

from numba import cuda, int32, uint32

from ...config.states_of_tiles import STATES_IN_WORD
from ...ptx import bits, special
from ..steps.integers import divide
from . import tile_walk


def make(config):
    threads, own_rows, of_keys = config.threads, config.tile.own, config.tile.of_keys
    states_of, ones = tile_walk.states_of(config), bits.count
    thread_index, block_index = special.thread_index, special.block_index

    @cuda.jit
    def tile_order(arrays, strides, sizes):
        thread = thread_index()
        states, by = states_of(arrays, strides)
        words = int32(by[2] - 1)
        tiles = divide(int32(sizes.seqlen_k if of_keys else sizes.seqlen_q) + int32(own_rows - 1), own_rows)
        blocks = divide(tiles + int32(threads - 1), threads)  # for a head
        head = divide(block_index(), blocks)
        row = int32(head * tiles * by[2])
        own_chunk = int32(block_index() - head * blocks)
        own, mine = int32(own_chunk * threads + thread), int32(0)
        counts = cuda.shared.array(threads, int32)

        rank = int32(0)
        # The block's own tiles first: from then on it is known how long they are.
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
