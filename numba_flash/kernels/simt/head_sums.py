"""The gradient of an option that is one number for each head: a sum over the rows of the head.

What a row gives says the option's file in kernels/score. The sum is over the batch too where the numbers are those of
every entry.

Launch: grid (heads, or batch * heads), block (a power of two). The order of the sums is fixed: each thread its rows,
then a tree over the threads.
"""

from numba import cuda

from ...ptx import shared
from ..score import OF_HEADS
from ..steps import elements, sequence as sequences


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    queries_of, of_row = sequences.queries(config), OF_HEADS[config.option].row_gradient(config)
    store, takes = elements.storer(config.given), config.takes
    gradient, of_strides = takes.arrays.index(config.gradient), takes.strides.index(config.gradient)

    @cuda.jit
    def sums_of_heads(arrays, strides, sizes):
        heads = sizes.heads
        thread = cuda.threadIdx.x
        h = cuda.blockIdx.x % heads
        own_b = cuda.blockIdx.x // heads
        end_b = sizes.batch if config.batch_summed else own_b + 1
        parts = shared.pointer(cuda.shared.array(0, compute), 0)  # (threads,)
        part = compute(0)
        for b in range(own_b, end_b):
            sequence = queries_of(b, arrays, strides, sizes)
            for q_index in range(thread, sequence.seqlen_q, config.threads):
                part += of_row(sequence, h, q_index, arrays, strides, sizes)
        parts[thread] = part
        half = config.threads // 2
        while half:
            cuda.syncthreads()
            if thread < half:
                parts[thread] += parts[thread + half]
            half //= 2
        if thread == 0:
            total, by = parts[0], strides[of_strides]
            store(arrays[gradient], own_b * by[0] + h * by[1], total)

    return sums_of_heads
