"""Computes lse and delta of every query once, in the layout in which the tensor-core backward kernels read them.

    delta = rowsum(dO * O) - dlse          (kernels/simt/delta.py says why)

kernels/steps/row_products.py says which lanes have which rows, kernels/steps/lse_delta.py describes the layout.
Before wgmma/backward_fused it also sets the ticket and the turn counters to zero. With config.early the next kernel may
start when all blocks have started. It waits before it reads their results (ptx/griddepcontrol.py).

Launch: grid (units of 16 queries of all heads / those of a block, rounded up).
"""

import math

from numba import cuda, float32, int32, int64, uint32

from ...ptx import griddepcontrol, special
from ..steps import lse_delta, row_products, tile_numbers
from ..steps.integers import divide
from ..steps.sequence import lse_row, query_row
from ..steps.units import LOG2_E


def make(config):
    lanes, count, turns_of = config.lanes, config.rows_of_lanes, config.turns_of
    products, turn_words = row_products.make(config), 2 * config.dq_partials
    numbers = tile_numbers.make(config, turns_of, False) if config.in_order and turns_of else None
    unit, inf = float32(1.0 if config.natural else LOG2_E), float32(math.inf)

    @cuda.jit
    def preprocess(arrays, strides, sizes):
        if config.early:
            griddepcontrol.launch_dependents()
        thread, block = special.thread_index(), special.block_index()
        lane = int32(thread % lanes)
        rows = products.rows_of(thread, block, arrays, strides, sizes)
        sequence, h, query = rows.sequence, rows.h, int32(rows.first + (lane & int32(count - 1)))
        seqlen_q, own = sequence.seqlen_q, lane < count
        lse, dlse = inf, float32(0)
        if own and query < seqlen_q:
            lse = float32(arrays.lse[lse_row(sequence, h, query, sizes)]) * unit
            lse = inf if lse == -inf else lse
            if config.has_dlse:
                dlse = arrays.dlse[query_row(strides.dlse, sequence, h, query)]
        delta = products.sum_of_row(rows, lane, arrays, strides) - dlse
        if turns_of:
            if block == 0 and thread == 0:
                arrays.turns[0] = uint32(0)
            if config.in_order:  # all of them: two blocks may have the same rows
                words = int64(sizes.heads) * numbers.count(sizes) * turn_words
                for word in range(block * config.threads + thread, words, special.block_count() * config.threads):
                    arrays.turns[lse_delta.TURNS_AT + word] = uint32(0)
            elif own and query < seqlen_q and query % turns_of == 0:
                tiles = divide(int32(seqlen_q + (turns_of - 1)), turns_of)
                tile = int64(rows.head_of_all) * tiles + query // turns_of
                for word in range(turn_words):
                    arrays.turns[lse_delta.TURNS_AT + turn_words * tile + word] = uint32(0)
        if own and query < lse_delta.row_blocks(seqlen_q) * 16:
            at = lse_delta.block_row(sequence, h, query, sizes)
            arrays.lse_delta[at] = lse
            arrays.lse_delta[at + lse_delta.MINUS_DELTA] = -delta

    return preprocess
