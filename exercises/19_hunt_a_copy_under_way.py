"""Bug hunt: read before it arrived

Teaches: what the simulator says of asynchronous copies. On a GPU this kernel is right whenever the copy is quick.
Minutes: 10
Read: docs/tensor_cores.md, "Loading tiles: `cp.async`"
"""

from numba import cuda, float32

from numba_flash.ptx import cp_async, memory, shared

THREADS = 8
wait = cp_async.wait_group(0)


@cuda.jit
def reversed_rows(x, out, tiles):
    """Each tile is 8 rows of 4 float32 numbers. Thread i copies row i and stores the sum of row 7 - i."""
    tile = cuda.shared.array((THREADS, 4), float32)
    base = shared.address(tile)
    i = cuda.threadIdx.x
    for j in range(tiles):
        cp_async.copy16(base + 16 * i, memory.address(x, (j * THREADS + i) * 4), 16)
        cp_async.commit_group()
        cuda.syncthreads()
        wait()
        total = float32(0)
        for y in range(4):
            total += tile[THREADS - 1 - i, y]
        out[j * THREADS + i] = total
        cuda.syncthreads()
