"""Bits of a word (PTX ISA 9.7.1). Any compute capability, any thread, no ordering."""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def highest(typingctx, word):
    """bfind.u32: the number of the highest bit that is 1, int32; -1 where none is. Stand-in: sim.bits.highest."""
    return asm.scalars("bfind.u32 $0, $1;", types.int32(types.uint32))


@intrinsic
def count(typingctx, word):
    """popc.b32: how many bits are 1, int32. Stand-in: sim.bits.count."""
    return asm.scalars("popc.b32 $0, $1;", types.int32(types.uint32))


@intrinsic
def multiply_wide(typingctx, x, y):
    """mul.wide.u32: all 64 bits of x * y, uint64. Stand-in: sim.bits.multiply_wide."""
    return asm.scalars("mul.wide.u32 $0, $1, $2;", types.uint64(types.uint32, types.uint32), effect=False)


@intrinsic
def push_carry(typingctx, bits, x, y):
    """add.cc.u32 and addc.u32: 2 * bits, and 1 more where x + y does not fit into 32 bits, uint32. Stand-in:
    sim.bits.push_carry."""
    text = "{ .reg .u32 sum; add.cc.u32 sum, $2, $3; addc.u32 $0, $1, $1; }"
    return asm.scalars(text, types.uint32(types.uint32, types.uint32, types.uint32), effect=False)
