"""Bug hunt: nobody can go on

Teaches: the report of a deadlock: who waits where, for which barrier. On a GPU the kernel just hangs, and only from the
    third tile on.
Minutes: 15
Read: docs/hopper.md, "Full and empty"
"""

from numba import cuda, float32, uint64

from numba_flash.ptx import mbarrier, shared

STAGES = 2
BARRIERS = ("K_FULL[0]", "K_FULL[1]", "K_EMPTY[0]", "K_EMPTY[1]", "V_FULL[0]", "V_FULL[1]", "V_EMPTY[0]", "V_EMPTY[1]")


@cuda.jit
def weighted(k, v, out):
    """Thread 0 loads K and V, a number a tile; thread 1 adds up their products."""
    bars = cuda.shared.array(4 * STAGES, uint64)
    k_ring = cuda.shared.array(STAGES, float32)
    v_ring = cuda.shared.array(STAGES, float32)
    k_full = shared.address(bars)
    k_empty, v_full, v_empty = k_full + 8 * STAGES, k_full + 16 * STAGES, k_full + 24 * STAGES
    if cuda.threadIdx.x == 0:
        for number in range(4 * STAGES):
            mbarrier.init(k_full + 8 * number, 1)
    cuda.syncthreads()
    total = float32(0)
    for n in range(k.shape[0]):
        at, parity = 8 * (n % STAGES), n // STAGES % 2
        if cuda.threadIdx.x == 0:
            mbarrier.wait(k_empty + at, parity ^ 1)
            k_ring[n % STAGES] = k[n]
            mbarrier.arrive(k_full + at)
            mbarrier.wait(v_empty + at, parity ^ 1)
            v_ring[n % STAGES] = v[n]
            mbarrier.arrive(v_full + at)
        else:
            mbarrier.wait(k_full + at, parity)
            score = k_ring[n % STAGES]
            mbarrier.arrive(k_empty + at)
            mbarrier.wait(v_full + at, parity)
            total += score * v_ring[n % STAGES]
    if cuda.threadIdx.x == 1:
        out[0] = total
