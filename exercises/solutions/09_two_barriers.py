"""Where the barriers belong

Teaches: a race is a read and a write with no barrier in between. A tile in shared memory needs two barriers: it must be
    there before it is read, and everyone must be done with it before it is written over.
Minutes: 10
Read: docs/first_kernels.md, line 6 of listing 5
Solution: numba_flash/kernels/simt/v2.py, its two cuda.syncthreads()
"""

from numba import cuda, float32

TILE, DIM = 8, 4


@cuda.jit
def scores(q, k, s):
    """S = Q K^T: 8 threads, a row of S each. Put cuda.syncthreads() where one is needed, and pass where none is."""
    tile = cuda.shared.array((TILE, DIM), float32)
    row = cuda.threadIdx.x
    for j in range(k.shape[0] // TILE):
        cuda.syncthreads()
        for x in range(DIM):
            tile[row, x] = k[j * TILE + row, x]  # each thread loads one key
        cuda.syncthreads()
        for y in range(TILE):
            total = float32(0)
            for x in range(DIM):
                total += q[row, x] * tile[y, x]
            s[row, j * TILE + y] = total
            pass
