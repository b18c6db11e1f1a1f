"""bar: the sixteen named barriers of a block (PTX ISA 9.7.13.1). Any compute capability.

A barrier opens when `threads` threads (a multiple of 32) have come, by sync or arrive; whole warps take
part. Accesses to memory before sync or arrive are seen after sync. Barrier 0 is cuda.syncthreads().
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def sync(typingctx, barrier, threads):
    """bar.sync barrier, threads: come and wait until it opens. Stand-in: sim.bar.sync."""
    return asm.scalars("bar.sync $0, $1;", types.void(types.int32, types.int32))


@intrinsic
def arrive(typingctx, barrier, threads):
    """bar.arrive barrier, threads: come and go on without waiting. Stand-in: sim.bar.arrive."""
    return asm.scalars("bar.arrive $0, $1;", types.void(types.int32, types.int32))


@intrinsic
def warp_sync(typingctx):
    """bar.warp.sync 0xffffffff: all 32 lanes wait for each other and see each other's accesses (PTX ISA 9.7.13.3)."""
    return asm.scalars("bar.warp.sync 0xffffffff;", types.void())
