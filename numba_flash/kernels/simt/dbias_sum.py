"""Runs after a dbias kernel whose blocks share the sum of an element: adds up their sums, and rounds once.

arrays.dbias_sums (splits, elements of dbias) has the sum of each split, in float32, or float64 for float64. An element
has config.parts threads, of which each adds up every parts-th sum, in order; one adds up what they found. The number of
splits follows from the shapes alone, and so do the bits. A thread loads config.loads numbers before it adds them up.

Launch: grid (elements of dbias / those of a block, rounded up), block (config.threads).
"""

from numba import cuda, int64

from ...ptx import local, shared
from ..steps import elements
from ..steps.basics import divide


def make(config):
    compute, store = elements.COMPUTE_TYPES[config.dtype], elements.storer(config.given)
    parts, loads, in_block = config.parts, config.loads, config.elements

    @cuda.jit
    def dbias_sum(arrays, strides, sizes):
        batch, heads, rows, keys = sizes.dbias_shape
        by, count, splits = strides.dbias, batch * heads * rows * keys, sizes.dbias_splits
        thread = cuda.threadIdx.x
        part = thread // in_block
        at = int64(cuda.blockIdx.x) * in_block + thread % in_block
        sums = shared.pointer(cuda.shared.array(0, compute), 0)  # (parts, elements)
        total, loaded = compute(0), local.array(loads, compute)
        if at < count:
            for first in range(part, splits, parts * loads):
                for i in range(loads):
                    split = min(first + i * parts, splits - 1)
                    loaded[i] = arrays.dbias_sums[split * count + at]
                for i in range(loads):
                    if first + i * parts < splits:
                        total += loaded[i]
        sums[thread] = total
        cuda.syncthreads()
        if part == 0 and at < count:
            total = compute(0)
            for other in range(parts):
                total += sums[other * in_block + thread]
            row = divide(at, keys)  # 32 bits are enough: more elements would not have split sums
            head = divide(row, rows)
            b = divide(head, heads)
            place = b * by[0] + (head - b * heads) * by[1] + (row - head * rows) * by[2] + (at - row * keys) * by[3]
            store(arrays.dbias, place, total)

    return dbias_sum
