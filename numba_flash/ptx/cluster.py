"""Clusters: blocks that run at the same time and reach each other's shared memory (PTX ISA 4.1, 5.2.5). cc 9.0.

A kernel says how many blocks make one (`.reqnctapercluster`; here compiled.to_ptx writes it, from config.cluster). A
block's own shared addresses are addresses of the cluster too; those of another one come from `place_in`.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def rank(typingctx):
    """%cluster_ctarank, the block's number in its cluster. Any thread, no ordering. Stand-in: sim.cluster.rank."""
    return asm.scalars("mov.u32 $0, %cluster_ctarank;", types.int32())


@intrinsic
def place_in(typingctx, address, rank):
    """mapa.shared::cluster.u32: where block `rank` of the cluster has what this one has at a shared address.

    Any thread, no ordering. For instructions that take an address of the cluster (PTX ISA 9.7.9.23).
    """
    return asm.scalars("mapa.shared::cluster.u32 $0, $1, $2;", types.int32(types.int32, types.int32), effect=False)


@intrinsic
def sync(typingctx):
    """barrier.cluster.arrive.release and .wait.acquire: all threads of all blocks of the cluster, but those that have
    left the kernel. What each wrote before is seen by all behind it (PTX ISA 9.7.13.4). Stand-in: sim.cluster.sync."""
    return asm.scalars("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", types.void())
