"""dQ from the float32 sums of wgmma/backward_fused: scaled and rounded to 16 bits. With config.dq_partials a query tile
has several sums, which are added up first, the line of the first part before the others. A mask may have left none.

All threads wait for wgmma/backward_fused before they read what it wrote. It has waited for the kernel that wrote lse
and delta.

Launch: grid (batch * heads * tiles of 64 queries), block (128). The sums
are in the layout of the registers: a thread reads what one thread wrote. dq is contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import griddepcontrol, local, memory, special
from ..recompute import queries as recompute
from ..steps import row_writers, tile_numbers
from ..steps.basics import divide, inlined
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import QueryTile, key_range, make as make_sequence, query_row
from . import backward_dq_sums
from .backward_dq_alone import WRITTEN, present
from .backward_dq_sums import TURN
from .block import clear


def make(config):
    of_part, lines, has_mask = config.tile_m // 64, config.dq_partials, config.has("mask")
    columns, head_blocks = config.dq_columns // 8, -(-config.head_dim // 16) * 2
    dq_count = 4 * head_blocks
    sequence_of, alone = make_sequence(config), present(config)
    store_dq = row_writers.of_gradient(config.dtype, 16, head_blocks, config.head_dim % 8 == 0)
    recompute_queries = recompute.make(config, of_keys=True)
    find_nonfinite = backward_dq_sums.nonfinite_finder(config)
    numbers = tile_numbers.make(config, config.tile_m, False) if config.packed else None
    complete = tile_numbers.completer(config, False) if config.packed else None

    @inlined
    def place_of(block, arrays, strides, sizes):
        """-> (sequence, h, first query, number of its query tile among all, its part of that)."""
        if config.packed:
            m_tiles = numbers.count(sizes)
            tiles = m_tiles * of_part
            h = divide(block, tiles)
            part = int32(block - h * tiles)
            number = divide(part, of_part)
            part = int32(part - number * of_part)
            b, first, rows = numbers.sequence(number, arrays, strides, sizes)
            first_query = int64((number - numbers.first(b, first)) * config.tile_m + part * 64)
            b = b if rows > 0 else int32(0)  # else there is no such sequence, and no query
            sequence = complete(b, first, rows, arrays, strides, sizes)
            return sequence, h, first_query, int64(h) * m_tiles + number, part
        tiles = divide(int32(sizes.seqlen_q) + int32(63), 64)
        head_of_all = divide(block, tiles)
        b = divide(head_of_all, sizes.heads)
        tile = int32(block - head_of_all * tiles)
        m_tiles = int64(divide(int32(sizes.seqlen_q) + int32(config.tile_m - 1), config.tile_m))
        m_tile = tile // of_part
        h, part = int32(head_of_all - b * sizes.heads), tile - m_tile * of_part
        sequence = sequence_of(b, arrays, strides, sizes)
        return sequence, h, int64(tile) * 64, head_of_all * m_tiles + m_tile, part

    @inlined
    def parts_of(sequence, first_query, sizes):
        """How many key tiles have a part of the sums."""
        first = first_query // config.tile_m * config.tile_m
        last = min(sequence.seqlen_q, first + config.tile_m) - 1
        begin, _, _, stop = key_range(sequence, first, last, sizes, config.tile_n)
        return stop - begin

    @inlined
    def repair(h, sequence, first_query, arrays, strides, sizes, score):
        """Computes those rows of dQ again that a block of wgmma/backward_fused wrote and that are not finite."""
        first_row, lane = (special.thread_index() >> int32(5)) * 16, special.thread_index() & int32(31)
        nonfinite = find_nonfinite(sequence, h, first_query + first_row, 16, lane, arrays, strides)
        if nonfinite != 0:
            query_tile = QueryTile(sequence.b, h, first_query, int32(0))
            recompute_queries(nonfinite, first_row, lane, query_tile, arrays, strides, sizes, score)

    @cuda.jit
    def round_dq(arrays, strides, sizes, score):
        if config.packed:  # outside runs behind
            griddepcontrol.launch_dependents()
        acc_dq = local.array(dq_count, float32)  # (head_dim / 8, 4)
        four = local.array(4, uint32)
        thread = special.thread_index()
        sequence, h, first_query, m_tile, part = place_of(special.block_index(), arrays, strides, sizes)
        at = ((m_tile * (lines * of_part) + part) * columns * 128 + thread) * 4
        clear(acc_dq, dq_count)
        griddepcontrol.wait()
        if config.packed:
            if first_query >= sequence.seqlen_q:
                return
        if alone and sequence.keys <= config.tile_n:
            turn = TURNS_AT + m_tile * 2
            state = arrays.turns[turn] | arrays.turns[turn + 1]
            if of_part == 2:
                state = arrays.turns[turn + part]
            if state == WRITTEN:
                return
            if state > WRITTEN:
                repair(h, sequence, first_query, arrays, strides, sizes, score)
                return
        parts = parts_of(sequence, first_query, sizes)
        for line in range(lines):
            there = line < parts
            if has_mask:
                there = there and arrays.turns[TURNS_AT + (m_tile * lines + line) * 2] >= uint32(TURN)
            if there:
                for n in range(head_blocks):
                    place = memory.address(arrays.dq_sums, at + (line * of_part * columns + n) * 512)
                    memory.load_v4(four, 0, place)
                    for x in range(4):
                        acc_dq[4 * n + x] += four[x].view(np.float32)
        first_row, lane = (thread >> int32(5)) * 16, thread & int32(31)
        left = int32(min(sequence.seqlen_q - first_query, 64) - first_row)
        to, row = query_row(strides.dq, sequence, h, first_query + first_row), strides.dq[2]
        nonfinite = store_dq(acc_dq, score.scale, lane, arrays.dq, to, row, left, left, int32(config.head_dim))
        if nonfinite != 0:
            query_tile = QueryTile(sequence.b, h, first_query, int32(0))
            recompute_queries(nonfinite, first_row, lane, query_tile, arrays, strides, sizes, score)

    return round_dq
