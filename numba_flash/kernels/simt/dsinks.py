"""The gradient of sinks, for every rung's backward: a sum over the rows of a head.

A sink is the score of one more key whose value is 0 (kernels/score/sinks.py). Its weight in a row is e^(sink - lse) and
its dP is 0, so that dS = P * (dP - delta) gives

    dsink = sum over rows of -e^(sink - lse) * delta,    delta = rowsum(dO * O) - dlse

over the batch too where the sinks are those of every entry. Nothing else in a backward knows of sinks: they are in lse.

Launch: grid (heads, or batch * heads), block (config.threads, a power of two), config.shared_bytes of dynamic shared
memory. The order of the sums is fixed: each thread its rows, then a tree over the threads.
"""

import math

from numba import cuda, int32, int64

from ...ptx import shared
from ..steps import elements, lse_delta


def make(config):
    threads, batch_summed, of_blocks = config.threads, config.batch_summed, config.of_blocks
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.sinks, compute), elements.storer(config.sinks)
    row_blocks, place, block_words = lse_delta.row_blocks, lse_delta.place, lse_delta.BLOCK_WORDS
    minus_delta_at, minus_inf = lse_delta.MINUS_DELTA, compute(-math.inf)

    @cuda.jit(device=True)
    def delta_of(arrays, head_of_all, q_index, seqlen_q):
        if of_blocks:
            at = int64(head_of_all) * (row_blocks(seqlen_q) * block_words) + place(int32(q_index))
            return -arrays.lse_delta[at + minus_delta_at]
        return arrays.delta[head_of_all * seqlen_q + q_index]

    @cuda.jit
    def sinks_of_rows(arrays, strides, sizes):
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        thread = cuda.threadIdx.x
        h = cuda.blockIdx.x % heads
        own_b = cuda.blockIdx.x // heads
        end_b = sizes.batch if batch_summed else own_b + 1
        parts = shared.pointer(cuda.shared.array(0, compute), 0)  # (threads,)
        sink = load(arrays.sinks, own_b * strides.sinks[0] + h * strides.sinks[1])
        part = compute(0)
        for b in range(own_b, end_b):
            head_of_all = b * heads + h
            for q_index in range(thread, seqlen_q, threads):
                lse = arrays.lse[head_of_all * seqlen_q + q_index]
                weight = compute(0)
                if lse != minus_inf:  # else neither the row nor its sink has any
                    weight = math.exp(sink - lse)
                if weight != 0:
                    part -= weight * delta_of(arrays, head_of_all, q_index, seqlen_q)
        parts[thread] = part
        half = threads // 2
        while half:
            cuda.syncthreads()
            if thread < half:
                parts[thread] += parts[thread + half]
            half //= 2
        if thread == 0:
            store(arrays.dsinks, own_b * strides.dsinks[0] + h * strides.dsinks[1], parts[0])

    return sinks_of_rows
