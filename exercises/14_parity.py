"""The parity of an mbarrier

Teaches: an mbarrier goes through phases, and who waits names the parity of the phase that must have ended. A ring of
    two places needs two barriers for each place: full and empty.
Minutes: 20
Read: docs/hopper.md, "Full and empty"
Solution: numba_flash/kernels/wgmma/pipeline.py
"""

from numba import cuda, float32, uint64

from numba_flash.ptx import mbarrier, shared

STAGES = 2
BARRIERS = ("FULL[0]", "FULL[1]", "EMPTY[0]", "EMPTY[1]")  # at so many times 8 bytes


@cuda.jit
def hand_over(x, out):
    """Thread 0 produces the tiles x[0], x[1], ...; thread 1 consumes them and stores twice their value."""
    bars = cuda.shared.array(2 * STAGES, uint64)
    ring = cuda.shared.array(STAGES, float32)
    full = shared.address(bars)
    empty = full + 8 * STAGES
    if cuda.threadIdx.x == 0:
        for stage in range(STAGES):
            mbarrier.init(full + 8 * stage, 1)  # one arrival ends a phase
            mbarrier.init(empty + 8 * stage, 1)
    cuda.syncthreads()
    for n in range(x.shape[0]):
        stage = n % STAGES
        turn = n // STAGES  # how often the ring has gone round
        # wait(barrier, parity) goes on when the phase of that parity has ended. The first phase has parity 0. A new
        # barrier is in its first phase, so waiting for parity 1 goes on at once.
        if cuda.threadIdx.x == 0:
            mbarrier.wait(empty + 8 * stage, ...)  # a new place is empty
            ring[stage] = x[n]
            mbarrier.arrive(full + 8 * stage)
        else:
            mbarrier.wait(full + 8 * stage, ...)
            out[n] = 2 * ring[stage]
            mbarrier.arrive(empty + 8 * stage)
