"""vote.sync: a question to all lanes of a warp (PTX ISA 9.7.13.8). cc 3.0.

All 32 lanes take part; no memory is ordered.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def ballot(typingctx, flag):
    """vote.sync.ballot.b32: in every lane a uint32 whose bit i says whether lane i's `flag` is not 0. Stand-in:
    sim.vote.ballot."""
    text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return asm.scalars(text, types.uint32(types.uint32))


@intrinsic
def any_lane(typingctx, flag):
    """vote.sync.any.pred: 1 in every lane when `flag` is not 0 in some lane, else 0. Stand-in: sim.vote.any_lane."""
    text = "{ .reg .pred p, r; setp.ne.u32 p, $1, 0; vote.sync.any.pred r, p, 0xffffffff; selp.u32 $0, 1, 0, r; }"
    return asm.scalars(text, types.uint32(types.uint32))
