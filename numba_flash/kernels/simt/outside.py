"""Rows of no packed sequence: o = 0 and lse = -inf, or gradients of 0.

A block has the gap between the end of one sequence and the beginning of the next, before the first or behind the last;
outside_parts blocks share it. From 0 to the number of rows, gaps and sequences follow each other: wherever sequences
begin, every row is written.

Launch: grid (gaps * outside_parts), block (config.threads).
"""

import math

from numba import cuda, int64

from ...ptx import griddepcontrol
from ..steps import elements, sequence
from ..steps.inlined import inlined, nothing


def make(config):
    of_keys, threads, compute = config.of_keys, config.threads, elements.COMPUTE_TYPES[config.dtype]
    sequence_of, store = sequence.make(config), elements.storer(config.dtype)
    zero, minus_inf, write_lse = compute(0), compute(-math.inf), "lse" in config.written

    def and_array(before, place, dim):
        @inlined
        def clear(row, arrays, strides, sizes):
            before(row, arrays, strides, sizes)
            by = strides[place]
            for h in range(sizes.heads_kv if of_keys else sizes.heads):
                for x in range(cuda.threadIdx.x, dim, threads):
                    store(arrays[place], h * by[1] + row * by[2] + x * by[3], zero)

        return clear

    clear_row = nothing
    for place, dim in enumerate(config.dims):
        clear_row = and_array(clear_row, place, dim)

    @inlined
    def rows_of(b, arrays, strides, sizes):
        """-> (first row, behind the last) of a sequence."""
        found = sequence_of(b, arrays, strides, sizes)
        if of_keys:
            return found.first_key, found.first_key + found.keys
        return found.first_query, found.first_query + found.seqlen_q

    @cuda.jit
    def outside(arrays, strides, sizes):
        if config.early:
            griddepcontrol.launch_dependents()
        gap = int64(cuda.blockIdx.x) // sizes.outside_parts
        begin, end = int64(0), sizes.total_k if of_keys else sizes.total_q
        if gap > 0:
            _, begin = rows_of(gap - 1, arrays, strides, sizes)
        if gap < sizes.batch:
            end, _ = rows_of(gap, arrays, strides, sizes)
        if config.waits:
            griddepcontrol.wait()
        for row in range(begin + int64(cuda.blockIdx.x) % sizes.outside_parts, end, sizes.outside_parts):
            clear_row(row, arrays, strides, sizes)
            if write_lse:
                for h in range(cuda.threadIdx.x, sizes.heads, threads):
                    arrays.lse[h * sizes.total_q + row] = minus_inf

    return outside
