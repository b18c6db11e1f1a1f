"""mbarrier: a barrier in shared memory that also counts bytes of asynchronous copies (PTX ISA 9.7.13.15). cc 9.0 here.

An mbarrier (8 bytes, a multiple of 8) is in a phase, 0 first. The phase ends when `count` arrivals have
come and as many bytes as were expected; the next begins with the same count. A wait names the parity of
the phase whose end it waits for: 0 for the first, then 1, 0, ...; on a fresh barrier a wait for parity 1
returns at once. Arriving releases the thread's earlier writes; a wait that returns acquires them, and
makes the copies' bytes visible to the waiting thread.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def init(typingctx, barrier, count):
    """mbarrier.init.shared::cta.b64 [barrier], count. One thread; others use it only after a barrier.

    Before the asynchronous proxy uses it (TMA) also fence.mbarrier_init. Stand-in: sim.mbarrier.init.
    """
    return asm.scalars("mbarrier.init.shared::cta.b64 [$0], $1;", types.void(types.int32, types.int32))


@intrinsic
def arrive(typingctx, barrier):
    """mbarrier.arrive.shared::cta.b64 _, [barrier]: one arrival of this thread. Stand-in: sim.mbarrier.arrive."""
    return asm.scalars("mbarrier.arrive.shared::cta.b64 _, [$0];", types.void(types.int32))


@intrinsic
def arrive_if(typingctx, barrier, condition):
    """`arrive` of the threads whose condition is not 0, as a predicated instruction.

    An `if` can become a branch, and ptxas does not trust the warp to be together behind one: it then keeps wgmma's
    descriptors in registers of the threads and moves each to a uniform one.
    """
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0]; }"
    return asm.scalars(text, types.void(types.int32, types.int32))


@intrinsic
def arrive_there_if(typingctx, place, condition):
    """`arrive_if` at an mbarrier of any block of the cluster, at an address from cluster.place_in.

    mbarrier.arrive.shared::cluster.b64 _, [place], with the order inside a block: enough to say that something was
    read. With .release.cluster it would wait for all that the thread has under way; that makes attention a quarter
    slower (H200).
    """
    text = "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cluster.b64 _, [$0]; }"
    return asm.scalars(text, types.void(types.int32, types.int32))


@intrinsic
def arrive_expect_tx(typingctx, barrier, count):
    """mbarrier.arrive.expect_tx: `count` more bytes belong to this phase, and one arrival of this thread."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    return asm.scalars(text, types.void(types.int32, types.int32))


@intrinsic
def arrive_expect_tx_if(typingctx, barrier, count, condition):
    """`arrive_expect_tx` of the threads whose condition is not 0, as arrive_if."""
    text = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1; }"
    return asm.scalars(text, types.void(types.int32, types.int32, types.int32))


@intrinsic
def wait(typingctx, barrier, parity):
    """Waits for the end of the phase of that parity: a loop around mbarrier.try_wait.parity.shared::cta.b64.

    Each waiting thread calls it for itself. Stand-in: sim.mbarrier.wait.
    """
    # Labels inside braces are local, so the text may stand many times in one kernel.
    text = """{
.reg .pred done;
WAITING:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;
@done bra DONE;
bra WAITING;
DONE:
}"""
    return asm.scalars(text, types.void(types.int32, types.int32))
