"""lse and delta of every query in the layout that the tensor-core backward reads. kernels/mma/backward_preprocess.py
computes them once.

lse is in the scores' unit (kernels/steps/units.py), and +inf for a query that sees no key, so that its weights become
0. -delta stands beside it. Blocks of 16 queries hold BLOCK_WORDS float32 numbers: 16 lse, then 16 -delta. Within both,
the four columns that a lane has of every 16 (ptx/fragments.py) are contiguous. A head has `row_blocks` blocks; queries
of the last one that do not exist have +inf and 0.
"""

import math

import numpy as np
from numba import int32, int64

from ...config.forward import ITEM_SIZE
from ...ptx import cp_async, ld_st, memory
from . import elements
from .basics import inlined, named
from .sequence import lse_row
from .units import exponent_unit

BLOCK_WORDS = 32
MINUS_DELTA = 16  # where -delta begins in a block
TURNS_AT = 32  # where the turn counters of wgmma/backward_fused begin, in words: away from the ticket


@inlined
def row_blocks(seqlen_q):
    return int32(int32(int32(seqlen_q) + int32(15)) >> int32(4))


@inlined
def packed_blocks(sizes):
    """Number of blocks that a head has room for, with packed sequences."""
    return row_blocks(sizes.total_q) + sizes.batch


@inlined
def head_row_blocks(sequence):
    """Blocks of a head. Each packed sequence begins with a block of its own, so there is one more for each."""
    return row_blocks(sequence.rows) + sequence.count


@inlined
def place(query):
    """Index of a query's lse in the blocks of its head."""
    at = query & 15
    return int64(query >> 4) * BLOCK_WORDS + ((at & 6) << 1) + ((at & 8) >> 2) + (at & 1)


@inlined
def head_blocks(sequence, h, sizes):
    """Index of the first of a head's blocks."""
    first = (sequence.first_query >> 4) + (sequence.b - sequence.entry)
    return int64(sequence.entry * sizes.heads + h) * (head_row_blocks(sequence) * BLOCK_WORDS) + first * BLOCK_WORDS


@inlined
def block_row(sequence, h, query, sizes):
    """Index of a query's lse in the blocks, `lse_row` of their layout."""
    return head_blocks(sequence, h, sizes) + place(query)


@inlined
def row_block(sequence, h, number, sizes):
    """Index of a head's number-th block."""
    first = (sequence.first_query >> 4) + (sequence.b - sequence.entry)
    return (int64(sequence.entry * sizes.heads + h) * head_row_blocks(sequence) + (number + first)) * BLOCK_WORDS


def of_query(config):
    """-> of_query(sequence, h, query, arrays, sizes), a device function: lse in the scores' units, +inf if the query
    sees no key or does not exist, and delta.

    It reads the blocks. In float32 and float64 it reads what the forward and the delta kernel wrote.
    """
    of_blocks, minus_delta_at = ITEM_SIZE[config.dtype] == 2, MINUS_DELTA
    real = elements.COMPUTE_TYPES[config.dtype]
    inf, minus_inf, unit = real(math.inf), real(-math.inf), real(exponent_unit(config))

    @inlined
    def found(sequence, h, query, arrays, sizes):
        if of_blocks:
            at = block_row(sequence, h, query, sizes)
            return arrays.lse_delta[at], -arrays.lse_delta[at + minus_delta_at]
        lse, delta = inf, real(0)
        if query < sequence.seqlen_q:
            at = lse_row(sequence, h, query, sizes)
            lse, delta = arrays.lse[at] * unit, arrays.delta[at]
            lse = inf if lse == minus_inf else lse
        return lse, delta

    return found


def staged(config, rows, threads):
    """-> device functions for lse and delta of a tile of `rows` queries through shared memory, in float32 and float64.
    A lane needs them for each of its columns; with reads of global memory there, dK and dV took 6 % longer (H200)."""
    size = ITEM_SIZE[config.dtype]
    copy, double = cp_async.small_copy(size), config.dtype == "float64"
    real = elements.COMPUTE_TYPES[config.dtype]
    inf, minus_inf, unit = real(math.inf), real(-math.inf), real(exponent_unit(config))

    @inlined
    def start_rows(rows_smem, head_at, first_query, seqlen_q, arrays, thread):
        """Start the copies of both; the caller commits, waits and owes a barrier. head_at: `lse_row` of query 0. Past
        the last query there are zeros."""
        for step in range(-(-rows // threads)):
            row = int32(thread + step * threads)
            if row < rows:
                query = int64(first_query + row)
                count = int32(size) if query < seqlen_q else int32(0)
                copy(int32(rows_smem + row * size), memory.address(arrays.lse, head_at + query), count)
                copy(int32(rows_smem + (rows + row) * size), memory.address(arrays.delta, head_at + query), count)

    @inlined
    def pair(values, x, at):
        """values[x : x + 2] <- two neighbours at a shared address."""
        if double:
            ld_st.load_v2_f64(values, x, at)
        else:
            for i in range(2):
                values[x + i] = ld_st.load_b32(int32(at + 4 * i)).view(np.float32)

    @inlined
    def lse_pair(values, x, at):
        """values[x : x + 2] <- lse of two neighbours, the first one's at `at`: in the scores' units, +inf if the query
        sees no key."""
        pair(values, x, at)
        for i in range(x, x + 2):
            values[i] = inf if values[i] == minus_inf else values[i] * unit

    @inlined
    def delta_pair(values, x, at):
        """values[x : x + 2] <- delta of two neighbours; `at` as in lse_pair."""
        pair(values, x, int32(at + rows * size))

    return named(start_rows, lse_pair, delta_pair)
