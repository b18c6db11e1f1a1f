"""Load a tile together

Teaches: the threads of a block share the load of a tile. Each element is read once, and neighbours read neighbours, so
    that a warp's reads are few wide ones (coalesced).
Minutes: 10
Read: docs/first_kernels.md, "Words for the GPU"
Solution: numba_flash/kernels/steps/tiles.py
"""

from numba import cuda, float32

ROWS, DIM = 8, 4


@cuda.jit
def load(k, first_row, out):
    """The rows first_row to first_row + ROWS - 1 of k, zeros past its end; 16 threads."""
    tile = cuda.shared.array((ROWS, DIM), float32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for index in range(thread, ROWS * DIM, threads):
        row = index // DIM
        column = index % DIM
        tile[row, column] = k[first_row + row, column] if first_row + row < k.shape[0] else 0
    cuda.syncthreads()
    for row in range(thread, ROWS, threads):  # to look at it
        for column in range(DIM):
            out[row, column] = tile[row, column]
