"""Computes lse and delta of every query once, in the layout in which the tensor-core backward kernels read them.

row_delta.py computes them, and kernels/steps/lse_delta.py describes the layout.
Before wgmma/backward_fused it also sets the ticket and the turn counters to zero. With config.early the next kernel may
start when all blocks have started. It waits before it reads their results (ptx/griddepcontrol.py).

Launch: grid (batch * heads * row tiles), block (config.threads). The tiles cover whole blocks of 16 queries.
"""

from numba import cuda, int32, int64, uint32

from ...ptx import griddepcontrol, special
from ..steps import lse_delta
from ..steps.integers import divide
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import queries_of
from . import row_delta


def make(config):
    lanes, rows, of_row = config.lanes, config.rows, row_delta.make(config)
    turns_of, turn_words = config.turns_of, 2 * config.dq_partials

    @cuda.jit
    def preprocess(arrays, strides, sizes):
        if config.early:
            griddepcontrol.launch_dependents()
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        thread, block = special.thread_index(), special.block_index()
        head_row_blocks = lse_delta.row_blocks(seqlen_q)
        tiles = divide(int32(head_row_blocks * 16 + (rows - 1)), rows)
        head_of_all = divide(block, tiles)
        b = divide(head_of_all, heads)
        h = int32(head_of_all - b * heads)
        sequence = queries_of(b, arrays, strides, sizes)
        query, lane = int32((block - head_of_all * tiles) * rows + thread // lanes), int32(thread % lanes)
        lse, minus_delta = of_row(sequence, h, query, lane, arrays, strides, sizes)
        if turns_of:
            if block == 0 and thread == 0:
                arrays.turns[0] = uint32(0)
            if lane == 0 and query < seqlen_q and query % turns_of == 0:
                tile = int64(head_of_all) * divide(int32(seqlen_q + (turns_of - 1)), turns_of) + query // turns_of
                for word in range(turn_words):
                    arrays.turns[TURNS_AT + turn_words * tile + word] = uint32(0)
        if lane == 0 and query < head_row_blocks * 16:
            at = lse_delta.block_row(sequence, h, query, sizes)
            arrays.lse_delta[at] = lse
            arrays.lse_delta[at + lse_delta.MINUS_DELTA] = minus_delta

    return preprocess
