"""Special registers, read where the function stands (PTX ISA 10). Any compute capability, any thread, no ordering.

The compiler takes cuda.threadIdx.x for a value that can be read once and kept, with everything that was
computed from it, in registers through the whole kernel. These are read anew: what is computed from
them after a loop does not have to be carried through it.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def thread_index(typingctx):
    """%tid.x, the thread in its block. Stand-in: sim.special.thread_index."""
    return asm.scalars("mov.u32 $0, %tid.x;", types.int32())


@intrinsic
def block_index(typingctx):
    """%ctaid.x, the block in the grid. Stand-in: sim.special.block_index."""
    return asm.scalars("mov.u32 $0, %ctaid.x;", types.int32())


@intrinsic
def block_count(typingctx):
    """%nctaid.x, how many blocks the grid has. Stand-in: sim.special.block_count."""
    return asm.scalars("mov.u32 $0, %nctaid.x;", types.int32())


@intrinsic
def opaque(typingctx, number):
    """mov.b32: the same int32, of which the compiler knows nothing: it does not write out a loop that ends there."""
    return asm.scalars("mov.b32 $0, $1;", types.int32(types.int32))
