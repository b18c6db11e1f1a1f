"""Copies under way: two buffers and cp.async

Teaches: while a tile is used, the next one is copied. A copy is there when its thread has waited for its group, and no
    sooner.
Minutes: 15
Read: docs/tensor_cores.md, "Loading tiles: `cp.async`"
Solution: numba_flash/kernels/mma/forward.py, which loads V while S is computed
"""

from numba import cuda, float32

from numba_flash.ptx import cp_async, memory, shared

TILE = 4  # float32 numbers: 16 bytes
NEWEST = ...  # wait until all groups but so many, the newest, have arrived

wait = cp_async.wait_group(NEWEST)
wait_for_all = cp_async.wait_group(0)


@cuda.jit
def sums(x, out, tiles):
    """out[j] = the sum of tile j. One thread; the tiles lie one behind the other in x."""
    buffers = cuda.shared.array((2, TILE), float32)
    base = shared.address(buffers)
    cp_async.copy16(base, memory.address(x, 0), 16)
    cp_async.commit_group()
    for j in range(tiles):
        if j + 1 < tiles:  # start the next copy, into the buffer that is not read now
            buffer = ...  # 0 or 1
            cp_async.copy16(base + 16 * buffer, memory.address(x, (j + 1) * TILE), 16)
            cp_async.commit_group()
            wait()
        else:
            wait_for_all()
        total = float32(0)
        for y in range(TILE):
            total += buffers[j % 2, y]
        out[j] = total
