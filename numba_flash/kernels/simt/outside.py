"""Writes rows of no packed sequence (kernels/steps/outside_rows.py). A block has the gap between two sequences;
outside_parts blocks share it. The gaps of keys follow those of queries.

Launch: grid (sides * gaps * outside_parts), block (config.threads).
"""

from numba import cuda, int32

from ...ptx import griddepcontrol
from ..steps import outside_rows


def make(config):
    sides = [outside_rows.make(config, side, config.threads) for side in config.sides]
    first, last, both = sides[0], sides[-1], len(sides) > 1

    @cuda.jit
    def outside(arrays, strides, sizes):
        thread, parts, gaps = int32(cuda.threadIdx.x), int32(sizes.outside_parts), int32(sizes.batch + 1)
        gap, part = int32(cuda.blockIdx.x) // parts, int32(cuda.blockIdx.x) % parts
        of_last = both and gap >= gaps
        if of_last:
            begin, end = last.gap(int32(gap - gaps), arrays, strides, sizes)
        else:
            begin, end = first.gap(gap, arrays, strides, sizes)
        if config.waits:
            griddepcontrol.wait()
        for row in range(begin + part, end, parts):
            if of_last:
                last.clear(row, thread, arrays, strides, sizes)
            else:
                first.clear(row, thread, arrays, strides, sizes)

    return outside
