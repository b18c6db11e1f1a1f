"""Rows of no packed sequence: o = 0 and lse = -inf, or gradients of 0.

They lie in gaps: before the first sequence, between the end of one and the beginning of the next, behind the last. From
0 to the number of rows, gaps and sequences follow each other: wherever sequences begin, every row is written.
"""

import functools
import math

from numba import int32

from ...ptx import special
from . import elements
from .basics import divide, inlined, named, nothing
from .sequence import make as make_sequence


@functools.cache
def make(config, written, threads):
    """written: (array, columns) of those of one side; threads: so many write a row together. -> device functions:

    gap(number, arrays, strides, sizes) -> (first row, behind the last) of a gap; there is one more than sequences, and
    those behind have no row.
    clear(row, thread, arrays, strides, sizes)
    """
    sequence_of, store = make_sequence(config), elements.storer(config.dtype)
    compute, of_keys = elements.COMPUTE_TYPES[config.dtype], written[0][0] in ("dk", "dv")
    zero, minus_inf, write_lse = compute(0), compute(-math.inf), "lse" in dict(written)
    parameters = config.parameters

    def and_array(before, name, dim):
        array, of_strides = parameters.arrays.index(name), parameters.strides.index(name)

        @inlined
        def clear(row, thread, arrays, strides, sizes):
            before(row, thread, arrays, strides, sizes)
            by = strides[of_strides]
            elements_of_row = int32((sizes.heads_kv if of_keys else sizes.heads) * dim)
            for x in range(thread, special.opaque(elements_of_row), threads):
                h = divide(x, dim)  # one loop, because some kernels have few registers for it
                store(arrays[array], h * by[1] + row * by[2] + (x - h * dim) * by[3], zero)

        return clear

    clear_row = nothing
    for name, dim in written:
        if name != "lse":
            clear_row = and_array(clear_row, name, dim)

    @inlined
    def rows_of(b, arrays, strides, sizes):
        """-> (first row, behind the last) of a sequence."""
        found = sequence_of(b, arrays, strides, sizes)
        if of_keys:
            return int32(found.first_key), int32(found.first_key + found.keys)
        return int32(found.first_query), int32(found.first_query + found.seqlen_q)

    @inlined
    def gap(number, arrays, strides, sizes):
        begin, end = int32(0), int32(sizes.total_k if of_keys else sizes.total_q)
        if number > sizes.batch:
            begin = end
        elif number > 0:
            begin = rows_of(number - 1, arrays, strides, sizes)[1]
        if number < sizes.batch:
            end = rows_of(number, arrays, strides, sizes)[0]
        return begin, end

    @inlined
    def clear(row, thread, arrays, strides, sizes):
        clear_row(row, thread, arrays, strides, sizes)
        if write_lse:
            for h in range(thread, sizes.heads, threads):
                arrays.lse[h * sizes.total_q + row] = minus_inf

    return named(gap, clear)
