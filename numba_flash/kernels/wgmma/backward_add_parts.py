"""Adds up the float32 sums of dK and dV when several blocks share a group of query heads; scales, rounds to 16 bits.

Parts are added in the order of their heads, so equal calls give equal bits.

All threads wait for the previous kernel before they read any sums. That kernel has waited for those before it.

Launch: grid (batch * heads_kv * tiles of 64 keys), block (128); dk_sums
(batch * heads_kv * parts, key tiles, tile_n / 64, head_dim_padded / 8, 128, 4) in the layout of the registers, and
dv_sums likewise. dk and dv are contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import griddepcontrol, local, memory, special
from ..steps.basics import divide, inlined, parts_of
from ..steps.sequence import make as make_sequence
from . import backward_outputs
from .block import clear


def make(config):
    of_tile, dk_padded, dv_padded = config.tile_n // 64, config.head_dim_padded, config.head_dim_v_padded
    # columns past head_dim are left out
    dk_blocks, dv_blocks = -(-config.head_dim // 16) * 2, -(-config.head_dim_v // 16) * 2
    dk_count, dv_count = 4 * dk_blocks if config.of_dk else 1, 4 * dv_blocks if config.of_dv else 1
    sequence_of = make_sequence(config)
    write = backward_outputs.key_rows(config, 64)

    def adder(blocks, padded):
        @inlined
        def add(acc, sums, first_part, parts, tiles, tile, thread):
            """acc (blocks, 4) <- the sum of all parts of the tile."""
            four = local.array(4, uint32)
            for part in range(parts):
                at = ((int64(first_part + part) * tiles + tile) * (padded // 8) * 128 + thread) * 4
                for block in range(blocks):
                    memory.load_v4(four, 0, memory.address(sums, at + block * 512))
                    for x in range(4):
                        acc[4 * block + x] += four[x].view(np.float32)

        return add

    add_dk, add_dv = adder(dk_blocks, dk_padded), adder(dv_blocks, dv_padded)

    @cuda.jit
    def add_parts(arrays, strides, sizes, score):
        acc_dk = local.array(dk_count, float32)  # (head_dim / 8, 4)
        acc_dv = local.array(dv_count, float32)  # (head_dim_v / 8, 4)
        thread, block = special.thread_index(), special.block_index()
        own_tiles = divide(int32(sizes.seqlen_k) + int32(63), 64)
        head_of_all = divide(block, own_tiles)
        b = divide(head_of_all, sizes.heads_kv)
        h_kv, tile = int32(head_of_all - b * sizes.heads_kv), int32(block - head_of_all * own_tiles)
        first_key = int32(tile * 64)
        sequence = sequence_of(b, arrays, strides, sizes)
        parts = int32(parts_of(divide(sizes.heads, sizes.heads_kv), config.members))
        tiles = divide(int32(sizes.seqlen_k) + int32(64 * of_tile - 1), 64 * of_tile) * of_tile
        clear(acc_dk, dk_count)
        clear(acc_dv, dv_count)
        griddepcontrol.wait()
        if config.of_dk:
            add_dk(acc_dk, arrays.dk_sums, head_of_all * parts, parts, tiles, tile, thread)
        if config.of_dv:
            add_dv(acc_dv, arrays.dv_sums, head_of_all * parts, parts, tiles, tile, thread)
        first_row, lane = (thread >> int32(5)) * 16, thread & int32(31)
        write(acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return add_parts
