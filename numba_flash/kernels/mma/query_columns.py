"""Copies lse, delta and a bias to shared memory with a tile of queries, for scores whose rows are keys.

In 16 bits lse and delta come from the blocks of kernels/steps/lse_delta.py, whose order is that of a lane's columns; in
float32 and float64 from what the forward and the delta kernel wrote.
"""

import numpy as np
from numba import int32, int64, uint32

from ...ptx import cp_async, ld_st, ldmatrix, local, memory, special
from ..steps import async_tiles, lse_delta
from ..steps.basics import first_column_of, inlined, lane_and_warp, named, panel_offset
from ..steps.sequence import lse_row


def make(config):
    """-> device functions. smem: the place of one tile's numbers."""
    groups, part = config.column_groups, config.tile_m // config.column_groups
    size, of_blocks = config.item_size, config.item_size == 2
    chunks = config.tile_m // 2  # of 16 bytes, in blocks
    staged = None if of_blocks else lse_delta.staged(config, config.tile_m, config.threads)

    @inlined
    def head_at(sequence, h, arrays, sizes):
        """Where a head's numbers begin: an address, or an index."""
        if of_blocks:
            return memory.address(arrays.lse_delta, lse_delta.head_blocks(sequence, h, sizes))
        return lse_row(sequence, h, 0, sizes)

    @inlined
    def head_step(sizes):
        """The distance from a head's numbers to the next head's."""
        if of_blocks:
            blocks = lse_delta.packed_blocks(sizes) if config.packed else lse_delta.row_blocks(sizes.seqlen_q)
            return blocks * (4 * lse_delta.BLOCK_WORDS)
        return sizes.total_q if config.packed else sizes.seqlen_q

    @inlined
    def start(i, head_at, smem, seqlen_q, arrays):
        """Starts the copies of query tile i."""
        thread = special.thread_index()
        if not of_blocks:
            staged.start_rows(smem, head_at, i * config.tile_m, seqlen_q, arrays, thread)
            return
        for step in range(-(-chunks // config.threads)):
            chunk = int32(thread + step * config.threads)
            if chunk < chunks:
                here = int32(i * (config.tile_m // 16) + (chunk >> 3)) < lse_delta.row_blocks(seqlen_q)
                source = head_at + int64(4) * int32(i * (2 * config.tile_m) + chunk * 4)
                cp_async.copy16(smem + 16 * chunk, source, 16 if here else 0)

    @inlined
    def lane_at(smem):
        """-> at, which the next two take."""
        thread = special.thread_index()
        group = (thread >> int32(5)) & (groups - 1)
        if of_blocks:
            return smem + group * (8 * part) + ((thread & 3) << 4)
        return int32(smem + (group * part + int32(first_column_of(thread & int32(31)))) * size)

    @inlined
    def lse(values, n, at):
        """values[n % 2 * 2 :] <- those of the lane's two columns of block n of 8, in the scores' units, +inf for a
        query that sees no key. To be called for n = 0, 1, 2 and so on."""
        if not of_blocks:
            staged.lse_pair(values, n % 2 * 2, int32(at + n * 8 * size))
        elif n % 2 == 0:  # two blocks of columns at a time
            four = local.array(4, uint32)
            ld_st.load_v4(four, 0, at + n * 64)
            for x in range(4):
                values[x] = four[x].view(np.float32)

    @inlined
    def minus_delta(values, n, at):
        if of_blocks:
            lse(values, n, at + 4 * lse_delta.MINUS_DELTA)
        else:
            staged.delta_pair(values, n % 2 * 2, int32(at + n * 8 * size))
            for x in range(n % 2 * 2, n % 2 * 2 + 2):
                values[x] = -values[x]

    return named(head_at, head_step, start, lane_at, lse, minus_delta)


def bias(config):
    """-> device functions: load, as of async_tiles.loader, and read, for a bias in 16 bits. From global memory a lane
    would load one number at a time, of rows far apart (kernels/score/reads.py). ldmatrix gives it two neighbouring
    queries of its keys, as kernels/wgmma/bias_boxes.py does of tiles that TMA loads."""
    blocks, at_once = config.tile_m // 8, min(config.tile_m, 32)  # queries of an instruction
    load = async_tiles.loader(config.tile_m, config.tile_n, config.threads)

    @inlined
    def read(loaded, r, tile):
        """loaded (2 * strips, tile_m / 8) <- the bias of the lane's row r; two columns in a register."""
        lane, warp = lane_and_warp()
        chunk, four = warp * (config.warp_rows // 8) + r, local.array(4, uint32)
        place = int32(tile + panel_offset(lane & (at_once - 1), chunk, config.tile_m))
        for n in range(0, blocks, 4):
            ldmatrix.x4_trans(four, 0, place + n * 1024)
            for x in range(min(blocks - n, 4)):
                loaded[r * blocks + n + x] = four[x]

    return named(load, read)
