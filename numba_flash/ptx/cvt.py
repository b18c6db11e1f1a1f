"""cvt: two float32 numbers rounded to 16 bits in one register, and back, and numbers to whole ones (PTX ISA 9.7.9.21).
cc 8.0; any thread, no ordering.

Rounding is to nearest, ties to even; what is too large for 16 bits becomes inf, NaN stays NaN.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def pack_f16x2(typingctx, low, high):
    """cvt.rn.f16x2.f32: low in bits 0 to 15, high in 16 to 31. Stand-in: sim.cvt.pack_f16x2."""
    text = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return asm.scalars(text, types.uint32(types.float32, types.float32), effect=False)


@intrinsic
def pack_bf16x2(typingctx, low, high):
    """cvt.rn.bf16x2.f32: low in bits 0 to 15, high in 16 to 31. Stand-in: sim.cvt.pack_bf16x2."""
    text = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return asm.scalars(text, types.uint32(types.float32, types.float32), effect=False)


@intrinsic
def low_f16(typingctx, two):
    """cvt.f32.f16: the float16 in bits 0 to 15 of a register, exactly. Stand-in: sim.cvt.low_f16."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return asm.scalars(text, types.float32(types.uint32), effect=False)


@intrinsic
def high_f16(typingctx, two):
    """cvt.f32.f16: the float16 in bits 16 to 31 of a register, exactly. Stand-in: sim.cvt.high_f16."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, high; }"
    return asm.scalars(text, types.float32(types.uint32), effect=False)


@intrinsic
def whole_f32(typingctx, x):
    """cvt.rni.s64.f32: a number below 2^63 as an int64. Stand-in: sim.cvt.whole_f32."""
    return asm.scalars("cvt.rni.s64.f32 $0, $1;", types.int64(types.float32), effect=False)


@intrinsic
def whole_f64(typingctx, x):
    """cvt.rni.s64.f64: a number below 2^63 as an int64. Stand-in: sim.cvt.whole_f64."""
    return asm.scalars("cvt.rni.s64.f64 $0, $1;", types.int64(types.float64), effect=False)
