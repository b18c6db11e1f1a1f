"""Behind a dbias kernel whose blocks share the sum of an element: adds up their sums, and rounds once.

arrays.dbias_sums (splits, elements of dbias) has the sum of each split, in float32, or float64 for float64. The order
of the additions is that of the splits, and their number follows from the shapes alone.

Launch: grid (elements of dbias / threads, rounded up), block (config.threads).
"""

from numba import cuda, int64

from ..steps import elements


def make(config):
    compute, store = elements.COMPUTE_TYPES[config.dtype], elements.storer(config.given)

    @cuda.jit
    def dbias_sum(arrays, strides, sizes):
        batch, heads, rows, keys = sizes.dbias_shape
        by, count = strides.dbias, batch * heads * rows * keys
        at = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if at < count:
            total = compute(0)
            for split in range(sizes.dbias_splits):
                total += arrays.dbias_sums[split * count + at]
            row, key = at // keys, at % keys
            head, query = row // rows, row % rows
            place = head // heads * by[0] + head % heads * by[1] + query * by[2] + key * by[3]
            store(arrays.dbias, place, total)

    return dbias_sum
