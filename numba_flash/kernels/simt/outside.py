"""Writes rows of no packed sequence (kernels/steps/outside_rows.py). outside_parts blocks share the gap in front of a
sequence. All blocks share that behind the last one, which is long where arrays have more rows than are used. Blocks of
keys follow those of queries.

Launch: grid (sides * sequences, at least one, * outside_parts), block (config.threads).
"""

from numba import cuda, int32

from ...ptx import griddepcontrol
from ..steps import outside_rows
from ..steps.basics import inlined


def make(config):
    threads, sides = config.threads, len(config.sides)

    def writer(side):
        rows = outside_rows.make(config, side, threads)

        @inlined
        def write(block, blocks, arrays, strides, sizes):
            """A block, one of `blocks` for this side, writes its rows."""
            thread, parts = int32(cuda.threadIdx.x), int32(sizes.outside_parts)
            begin, end = rows.gap(min(block // parts, int32(sizes.batch)), arrays, strides, sizes)
            last, total = rows.gap(int32(sizes.batch), arrays, strides, sizes)
            if config.waits:
                griddepcontrol.wait()
            for row in range(begin + block % parts, min(end, last), parts):
                rows.clear(row, thread, arrays, strides, sizes)
            for row in range(last + block, total, blocks):
                rows.clear(row, thread, arrays, strides, sizes)

        return write

    write_first, write_last = writer(config.sides[0]), writer(config.sides[-1])

    @cuda.jit
    def outside(arrays, strides, sizes):
        block, blocks = int32(cuda.blockIdx.x), int32(cuda.gridDim.x) // sides
        if sides == 1 or block < blocks:
            write_first(block, blocks, arrays, strides, sizes)
        else:
            write_last(int32(block - blocks), blocks, arrays, strides, sizes)

    return outside
