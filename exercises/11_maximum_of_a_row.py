"""The maximum of a row that four lanes hold

Teaches: a row of an mma result lies in four neighbouring lanes. Two shuffles give all four its maximum, without shared
    memory and without a barrier.
Minutes: 5
Read: docs/tensor_cores.md, "A warp's work"
Solution: numba_flash/kernels/mma/backward_dbias.py, where a quad adds up its `total`
"""

from numba import cuda

from numba_flash.ptx import shfl


@cuda.jit
def row_maximum(x, out):
    """Lanes 4 r to 4 r + 3 hold row r, one number each. Each of them gets the row's maximum."""
    lane = cuda.threadIdx.x
    m = x[lane]
    # shfl.bfly_f32(m, mask) gives each lane the m of the lane whose number is lane ^ mask.
    m = max(m, shfl.bfly_f32(m, ...))
    m = max(m, shfl.bfly_f32(m, ...))
    out[lane] = m
