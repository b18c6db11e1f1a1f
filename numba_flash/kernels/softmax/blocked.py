"""Softmax with one block per row: listing 3 of docs/algorithm.md. Threads compute parts, then the parts are joined.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3.1; equation 5 of
docs/algorithm.md, which also lets FlashAttention join tiles, splits of the keys, and GPUs.

Launch: grid (rows), block (config.threads, a power of two), 2 * threads numbers of shared memory.
"""

import math

from numba import cuda

from ...ptx import shared
from ..steps import elements


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    minus_inf = compute(-math.inf)

    @cuda.jit
    def softmax_blocked(arrays, strides, sizes):
        x, y, n = arrays.x, arrays.y, sizes.n
        row = cuda.blockIdx.x
        thread = cuda.threadIdx.x
        smem = cuda.shared.array(0, compute)
        m_smem = shared.pointer(smem, 0)  # (threads,)
        d_smem = shared.pointer(smem, config.threads)  # (threads,)

        # line 1: equation 3 on every threads-th element
        m = minus_inf
        d = compute(0)
        for i in range(thread, n, config.threads):
            x_i = load(x, row * strides.x[0] + i * strides.x[1])
            m_new = max(m, x_i)
            if m_new > minus_inf:
                d = d * math.exp(m - m_new) + math.exp(x_i - m_new)
                m = m_new
            elif x_i != x_i:
                d = x_i  # NaN makes the row NaN
        m_smem[thread] = m
        d_smem[thread] = d

        # lines 2 to 6: equation 5, halving the number of parts each time
        half = config.threads // 2
        while half > 0:
            cuda.syncthreads()
            if thread < half:
                m_s, d_s = m_smem[thread + half], d_smem[thread + half]
                m_b, d_b = m_smem[thread], d_smem[thread]
                m = max(m_b, m_s)
                if m > minus_inf:  # else both are empty
                    d_smem[thread] = d_s * math.exp(m_s - m) + d_b * math.exp(m_b - m)
                else:
                    d_smem[thread] = d_s + d_b
                m_smem[thread] = m
            half = half // 2
        cuda.syncthreads()

        # lines 7 and 8: equation 4
        m = m_smem[0]
        d = d_smem[0]
        for i in range(thread, n, config.threads):
            y_i = math.exp(load(x, row * strides.x[0] + i * strides.x[1]) - m) / d
            store(y, row * strides.y[0] + i * strides.y[1], y_i)

    return softmax_blocked
