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


@intrinsic
def store_b32(typingctx, place, value):
    """st.shared::cluster.b32: 4 bytes to any block of the cluster, at a place from place_in; seen there behind sync."""
    return asm.scalars("st.shared::cluster.b32 [$0], $1;", types.void(types.int32, types.uint32))


@intrinsic
def store_v4(typingctx, place, values, at, barrier):
    """st.async.v4.b32: 16 bytes to any block of the cluster = values[at : at + 4] (local uint32), and 16 bytes less
    that its mbarrier waits for (PTX ISA 9.7.9.12, version 8.1).

    place, barrier: from place_in, of the same block; place a multiple of 16. It runs on its own. Who waits at the
    mbarrier sees the bytes. Stand-in: sim.cluster.store_v4.
    """

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 4)
        text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        asm.emit(builder, f"{text}[$0], {asm.braces(1, 4)}, [$5];", [], [args[0], *values.load(), args[3]])
        return context.get_dummy_value()

    return types.void(types.int32, values, types.int32, types.int32), codegen
