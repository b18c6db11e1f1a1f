"""setmaxnreg: registers change hands between the warpgroups of a block (PTX ISA 9.7.20.5). cc 9.0a.

All warps of a warpgroup execute it, with a multiple of 8 from 24 to 256. Increasing waits until the
block has registers left, so another warpgroup must have decreased before or do so without waiting for
this one. Needs a register limit at the kernel's entry (launch_bounds), else the assembler ignores it.
"""

import functools

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@functools.cache
def increase(registers):
    """-> a function: setmaxnreg.inc.sync.aligned.u32 registers. Stand-in: sim.setmaxnreg.increase."""

    @intrinsic
    def setmaxnreg(typingctx):
        return asm.scalars(f"setmaxnreg.inc.sync.aligned.u32 {registers};", types.void())

    return setmaxnreg


@functools.cache
def decrease(registers):
    """-> a function: setmaxnreg.dec.sync.aligned.u32 registers. Stand-in: sim.setmaxnreg.decrease."""

    @intrinsic
    def setmaxnreg(typingctx):
        return asm.scalars(f"setmaxnreg.dec.sync.aligned.u32 {registers};", types.void())

    return setmaxnreg
