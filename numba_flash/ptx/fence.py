"""fence: order between accesses of one thread, seen by other threads and other proxies (PTX ISA 9.7.13.4).

A fence orders; it does not wait for other threads: a barrier has to follow where they are concerned.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def proxy_async(typingctx):
    """fence.proxy.async.shared::cta: this thread's earlier ordinary accesses to shared memory come before later
    ones of the asynchronous proxy (TMA, wgmma's operands). cc 9.0. Stand-in: sim.fence.proxy_async."""
    return asm.scalars("fence.proxy.async.shared::cta;", types.void())


@intrinsic
def mbarrier_init(typingctx):
    """fence.mbarrier_init.release.cluster: this thread's mbarrier.init is known to the asynchronous proxy. cc 9.0"""
    return asm.scalars("fence.mbarrier_init.release.cluster;", types.void())


@intrinsic
def proxy_async_global(typingctx):
    """fence.proxy.async.global: likewise for global memory, in both directions. cc 9.0."""
    return asm.scalars("fence.proxy.async.global;", types.void())
