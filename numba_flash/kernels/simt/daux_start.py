"""Sets the sums of all elements to 0 before the gradients of aux (kernels/score/aux_gradient.py).

Launch: grid (elements / threads, rounded up), block (config.threads).
"""

from numba import cuda, int64

from ...config.aux_gradients import words


def make(config):
    count = words(config.compute_dtype)

    @cuda.jit
    def daux_start(arrays, sizes):
        at = int64(cuda.blockIdx.x) * cuda.blockDim.x + cuda.threadIdx.x
        if at < sizes.aux_begins[-1]:
            for word in range(count):
                arrays.aux_sums[word * sizes.aux_begins[-1] + at] = int64(0)

    return daux_start
