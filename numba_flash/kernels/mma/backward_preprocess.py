"""Computes lse and delta of every query once, in the layout in which the tensor-core backward kernels read them.

    delta = rowsum(dO * O) - dlse          (kernels/simt/delta.py says why)

A few neighbouring lanes share a row and read 16 bytes at a time. kernels/steps/lse_delta.py describes the layout.
Before wgmma/backward_fused it also sets the ticket and the turn counters to zero. With config.early the next kernel may
start when all blocks have started. It waits before it reads their results (ptx/griddepcontrol.py).

Launch: grid (batch * heads * row tiles). The tiles cover whole blocks of 16 queries.
"""

import math

from numba import cuda, float32, int32, int64, uint32

from ...ptx import griddepcontrol, local, memory, shfl, special
from ..score import reads as score_reads
from ..steps import elements, lse_delta, tile_numbers
from ..steps import sequence as sequences
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import lse_row, query_row
from ..steps.units import LOG2_E


def make(config):
    head_dim_v, lanes, rows, turns_of = config.head_dim_v, config.lanes, config.rows, config.turns_of
    distances = tuple(2**i for i in range(lanes.bit_length() - 1))
    load, half_of = elements.loader(config.dtype, float32), score_reads.halves(config.dtype)
    product, turn_words = lse_delta.product(config), 2 * config.dq_partials
    numbers = tile_numbers.make(config, turns_of, False) if config.in_order and turns_of else None
    queries_of = sequences.queries(config)

    @inlined
    def found_by_entry(b, first, rows, arrays, strides, sizes):
        return queries_of(b, arrays, strides, sizes)

    @inlined
    def found_by_number(b, first, rows, arrays, strides, sizes):
        return tile_numbers.queries_of(b, first, rows, sizes)

    blocks_of_16 = max(16 // rows, 1)  # that write one block of 16 queries
    own_numbers = tile_numbers.make(config, rows * blocks_of_16, False) if config.in_order else None
    sequence_of = found_by_number if config.in_order else found_by_entry
    unit, inf = float32(1.0 if config.natural else LOG2_E), float32(math.inf)

    @cuda.jit
    def preprocess(arrays, strides, sizes):
        if config.early:
            griddepcontrol.launch_dependents()
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        thread, block = special.thread_index(), special.block_index()
        head_row_blocks = lse_delta.row_blocks(seqlen_q)
        if config.in_order:
            tiles = own_numbers.count(sizes) * blocks_of_16
            head_of_all = divide(block, tiles)
            number = divide(block - head_of_all * tiles, blocks_of_16)
            in_block = int32(block - head_of_all * tiles - number * blocks_of_16)
            # One thread looks for the sequence: 256 would take longer than what the block reads.
            found = cuda.shared.array(3, int32)
            if thread == 0:
                found[0], found[1], found[2] = own_numbers.sequence(number, arrays, strides, sizes)
            cuda.syncthreads()
            b, first_row, in_sequence = found[0], found[1], found[2]
            first_query = int32((number - own_numbers.first(b, first_row)) * (rows * blocks_of_16) + in_block * rows)
        else:
            tiles = divide(int32(head_row_blocks * 16 + (rows - 1)), rows)
            head_of_all = divide(block, tiles)
            b, first_query = divide(head_of_all, heads), int32((block - head_of_all * tiles) * rows)
            first_row, in_sequence = int32(0), int32(0)
        h = int32(head_of_all - (0 if config.in_order else b * heads))
        sequence = sequence_of(b, first_row, in_sequence, arrays, strides, sizes)
        if config.packed:
            seqlen_q, head_row_blocks = sequence.seqlen_q, lse_delta.row_blocks(sequence.seqlen_q)
        query, lane = int32(first_query + thread // lanes), int32(thread % lanes)
        four_do = local.array(4, uint32)
        four_o = local.array(4, uint32)

        part = float32(0)
        if query < seqlen_q:
            do_base, o_base = query_row(strides.do, sequence, h, query), query_row(strides.o, sequence, h, query)
            for step in range(-(-head_dim_v // (8 * lanes))):
                x = int32((lane + step * lanes) * 8)
                if config.wide and x + 8 <= head_dim_v:
                    memory.load_v4(four_do, 0, memory.address(arrays.do, do_base + x))
                    memory.load_v4(four_o, 0, memory.address(arrays.o, o_base + x))
                    for i in range(4):
                        low = product(half_of(four_do[i], 0), half_of(four_o[i], 0))
                        part += low + product(half_of(four_do[i], 1), half_of(four_o[i], 1))
                else:
                    for column in range(x, min(x + 8, head_dim_v)):
                        from_do = load(arrays.do, do_base + column * strides.do[3])
                        part += product(from_do, load(arrays.o, o_base + column * strides.o[3]))
        for distance in distances:
            part += shfl.bfly_f32(part, distance)
        if turns_of:
            if block == 0 and thread == 0:
                arrays.turns[0] = uint32(0)
            if config.in_order:  # all of them: two blocks may have the same rows
                words = int64(heads) * numbers.count(sizes) * turn_words
                for word in range(block * config.threads + thread, words, special.block_count() * config.threads):
                    arrays.turns[lse_delta.TURNS_AT + word] = uint32(0)
            elif lane == 0 and query < seqlen_q and query % turns_of == 0:
                tile = int64(head_of_all) * divide(int32(seqlen_q + (turns_of - 1)), turns_of) + query // turns_of
                for word in range(turn_words):
                    arrays.turns[lse_delta.TURNS_AT + turn_words * tile + word] = uint32(0)
        if lane == 0 and query < head_row_blocks * 16:
            lse = inf
            if query < seqlen_q:
                at = lse_row(sequence, h, query, sizes)
                lse = float32(arrays.lse[at]) * unit
                lse = inf if lse == -inf else lse
                if config.has_dlse:
                    part -= arrays.dlse[query_row(strides.dlse, sequence, h, query)]
            at = lse_delta.block_row(sequence, h, query, sizes)
            arrays.lse_delta[at] = lse
            arrays.lse_delta[at + lse_delta.MINUS_DELTA] = -part

    return preprocess
