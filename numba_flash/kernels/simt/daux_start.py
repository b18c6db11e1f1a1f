"""Before the gradients of aux: bounds and sums of all elements are 0 (kernels/score/aux_gradient.py).

Launch: grid (elements / threads, rounded up), block (config.threads).
"""

from numba import cuda, int64, uint32

from ..score import aux_gradient


def make(config):
    words = aux_gradient.words(config.compute_dtype)

    @cuda.jit
    def daux_start(arrays, sizes):
        at = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if at < sizes.aux_begins[-1]:
            arrays.aux_bounds[at + 1] = uint32(0)
            for word in range(words):
                arrays.aux_sums[at * words + word] = int64(0)
        if at == 0:
            arrays.aux_bounds[0] = uint32(1)

    return daux_start
