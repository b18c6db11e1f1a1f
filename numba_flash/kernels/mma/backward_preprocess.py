"""Computes lse and delta of every query once, in the layout in which the tensor-core backward kernels read them.

    delta = rowsum(dO * O) - dlse          (kernels/simt/delta.py says why)

kernels/steps/row_products.py says which lanes have which rows, kernels/steps/lse_delta.py describes the layout.
Before wgmma/backward_fused it also sets the ticket and the turn counters to zero. With config.early the next kernel may
start when all blocks have started. It waits before it reads their results (ptx/griddepcontrol.py).

Launch: grid (units of 16 queries of all heads / those of a block, rounded up).
"""

import math
from collections import namedtuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import griddepcontrol, ld_st, special
from ..steps import lse_delta, row_products, tile_numbers
from ..steps.basics import divide, inlined, named, tiles_of
from ..steps.row_products import Rows
from ..steps.sequence import lse_row, query_row
from ..steps.units import LOG2_E

# A query's numbers that the backward kernels read. own: whether the lane has a query.
Known = namedtuple("Known", "query own lse minus_delta")


def of_rows(config):
    """-> device functions. find(rows, lane, arrays, strides, sizes): Known of the lane's own one of these Rows
    (kernels/steps/row_products.py). put(known, rows, arrays, sizes): stores it for the backward kernels."""
    count, products = config.rows_of_lanes, row_products.make(config)
    unit, inf = float32(1.0 if config.natural else LOG2_E), float32(math.inf)

    @inlined
    def find(rows, lane, arrays, strides, sizes):
        sequence, h, query = rows.sequence, rows.h, int32(rows.first + (lane & int32(count - 1)))
        own = lane < count
        lse, dlse = inf, float32(0)
        if own and query < sequence.seqlen_q:
            lse = float32(arrays.lse[lse_row(sequence, h, query, sizes)]) * unit
            lse = inf if lse == -inf else lse
            if config.has_dlse:
                dlse = arrays.dlse[query_row(strides.dlse, sequence, h, query)]
        delta = products.sum_of_row(rows, lane, arrays, strides) - dlse
        return Known(query, own, lse, -delta)

    @inlined
    def put(known, rows, arrays, sizes):
        if known.own and known.query < lse_delta.row_blocks(rows.sequence.seqlen_q) * 16:
            at = lse_delta.block_row(rows.sequence, rows.h, known.query, sizes)
            arrays.lse_delta[at] = known.lse
            arrays.lse_delta[at + lse_delta.MINUS_DELTA] = known.minus_delta

    return named(find, put, rows_of=products.rows_of)


def in_backward(config):
    """-> start(smem, sequence, h, arrays, strides, sizes), a device function of a block of backward.py: the work of
    this kernel for the only tile of queries of head h. lse and delta also go to shared memory, in the order of
    lse_delta.py, and to global memory for rows that are computed again and for the kernels behind. The caller owes a
    barrier."""
    own = config.own_delta
    lanes, count, rows_at = own.lanes, own.rows_of_lanes, of_rows(own)
    at_a_time = config.threads // lanes * count

    @inlined
    def start(smem, sequence, h, arrays, strides, sizes):
        thread = special.thread_index()
        lane = int32(thread & int32(lanes - 1))
        for step in range(-(-config.tile_m // at_a_time)):
            first = int32(thread // lanes * count + step * at_a_time)
            if first < config.tile_m:
                rows = Rows(sequence, h, int32(0), first)
                known = rows_at.find(rows, lane, arrays, strides, sizes)
                rows_at.put(known, rows, arrays, sizes)
                if known.own:
                    at = int32(smem + 4 * int32(lse_delta.place(known.query)))
                    ld_st.store_b32(at, known.lse.view(np.uint32))
                    ld_st.store_b32(at + 4 * lse_delta.MINUS_DELTA, known.minus_delta.view(np.uint32))

    return start


def make(config):
    lanes, turns_of, turn_words = config.lanes, config.turns_of, 2 * config.dq_partials
    known_rows, part_keys, clears_all = of_rows(config), config.part_keys, config.in_order or config.part_keys > 0
    numbers = tile_numbers.make(config, turns_of, False) if config.in_order and turns_of else None

    @inlined
    def words_of(sizes):
        """The number of all turn counters."""
        if not part_keys:
            return int64(sizes.heads) * numbers.count(sizes) * turn_words
        of_queries = int64(sizes.heads) * tiles_of(sizes.seqlen_q, turns_of) * turn_words
        return (of_queries + sizes.heads_kv * tiles_of(sizes.seqlen_k, part_keys)) * sizes.batch

    @cuda.jit
    def preprocess(arrays, strides, sizes):
        if config.early:
            griddepcontrol.launch_dependents()
        thread, block = special.thread_index(), special.block_index()
        lane = int32(thread % lanes)
        rows = known_rows.rows_of(thread, block, arrays, strides, sizes)
        known, seqlen_q = known_rows.find(rows, lane, arrays, strides, sizes), rows.sequence.seqlen_q
        if turns_of:
            if block == 0 and thread == 0:
                arrays.turns[0] = uint32(0)
            if clears_all:  # of packed sequences two blocks may have the same rows
                words = words_of(sizes)
                for word in range(block * config.threads + thread, words, special.block_count() * config.threads):
                    arrays.turns[lse_delta.TURNS_AT + word] = uint32(0)
            elif known.own and known.query < seqlen_q and known.query % turns_of == 0:
                tiles = divide(int32(seqlen_q + (turns_of - 1)), turns_of)
                tile = int64(rows.head_of_all) * tiles + known.query // turns_of
                for word in range(turn_words):
                    arrays.turns[lse_delta.TURNS_AT + turn_words * tile + word] = uint32(0)
        known_rows.put(known, rows, arrays, sizes)

    return preprocess
