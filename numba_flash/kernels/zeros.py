"""Zeros for the words by which mma_backward_dkdv's blocks take turns: one for each query tile of a head, and one more.

Launch: grid (words / config.threads, rounded up), block (config.threads).
"""

from numba import cuda


def make(config):
    tile_m, threads = config.tile_m, config.threads

    @cuda.jit
    def zeros(turns, batch, heads, seqlen_q):
        at = cuda.blockIdx.x * threads + cuda.threadIdx.x
        if at <= batch * heads * ((seqlen_q + tile_m - 1) // tile_m):
            turns[at] = 0

    return zeros
