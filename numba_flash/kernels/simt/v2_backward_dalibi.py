"""The gradient of ALiBi's slopes: the sums that v2_backward_dq.py found for each row, added up.

A score has - slope * |q_pos - k_pos|, so a slope's gradient is the sum of -dS * |q_pos - k_pos| over all rows of its
head, and over the batch where the slopes are those of every entry.

Launch: grid (heads, or batch * heads), block (config.threads, a power of two), config.shared_bytes of dynamic shared
memory. The order of the sums is fixed: each thread its rows, then a tree over the threads.
"""

from numba import cuda

from ...ptx import shared
from ..steps import elements


def make(config):
    threads, batch_summed = config.threads, config.batch_summed
    compute = elements.COMPUTE_TYPES[config.dtype]
    store = elements.storer(config.dtype_of("alibi_slopes"))

    @cuda.jit
    def slopes_of_rows(arrays, strides, sizes):
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        thread = cuda.threadIdx.x
        h = cuda.blockIdx.x % heads
        own_b = cuda.blockIdx.x // heads
        end_b = sizes.batch if batch_summed else own_b + 1
        parts = shared.pointer(cuda.shared.array(0, compute), 0)  # (threads,)
        part = compute(0)
        for b in range(own_b, end_b):
            base = (b * heads + h) * seqlen_q
            for q_index in range(thread, seqlen_q, threads):
                part += arrays.slope_rows[base + q_index]
        parts[thread] = part
        half = threads // 2
        while half:
            cuda.syncthreads()
            if thread < half:
                parts[thread] += parts[thread + half]
            half //= 2
        if thread == 0:
            at = own_b * strides.dalibi_slopes[0] + h * strides.dalibi_slopes[1]
            store(arrays.dalibi_slopes, at, parts[0])

    return slopes_of_rows
