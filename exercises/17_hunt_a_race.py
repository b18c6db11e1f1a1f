"""Bug hunt: right today, wrong tomorrow

Teaches: the race check. A barrier in the wrong place may give the right result in one run; race_check names the two
    threads, the line and the address in every run.
Minutes: 10
Read: docs/stepping.md, "Races"
"""

from numba import cuda, float32

TILE, DIM = 8, 4


@cuda.jit
def means(k, v, out):
    """out[i] = the mean of v over the keys that are like key i: 8 threads, all tiles of keys."""
    tile = cuda.shared.array((TILE, DIM), float32)
    i = cuda.threadIdx.x
    total, count = float32(0), 0
    for j in range(k.shape[0] // TILE):
        cuda.syncthreads()
        for x in range(DIM):
            tile[i, x] = k[j * TILE + i, x]
        for y in range(TILE):
            product = float32(0)
            for x in range(DIM):
                product += tile[y, x] * k[i, x]
            if product > 0:
                total += v[j * TILE + y]
                count += 1
        cuda.syncthreads()
    out[i] = total / count if count else 0
