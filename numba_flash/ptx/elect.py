"""elect.sync: one lane of a warp chosen (PTX ISA 9.7.13.14), cc 9.0. All 32 lanes take part, no memory is ordered."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def one_lane(typingctx):
    """1 in the chosen lane, always the same one, 0 in the others. Stand-in: sim.elect.one_lane."""
    text = "{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
    return asm.scalars(text, types.uint32())
