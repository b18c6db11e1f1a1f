"""Functions of one instruction: ex2, lg2, rcp (PTX ISA 9.7.3.21, 9.7.3.20, 9.7.3.15), which are approximate, and ceil.

Any compute capability, any thread, no ordering. ftz flushes subnormal operands and results to zero: without it
ex2 is four machine instructions (seen in the SASS for sm_90a). Results may be reused or moved by the compiler.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def ex2(typingctx, x):
    """ex2.approx.ftz.f32: 2 ** x, relative error at most 2**-22; ex2(-inf) = 0. Stand-in: sim.approx.ex2."""
    return asm.scalars("ex2.approx.ftz.f32 $0, $1;", types.float32(types.float32), effect=False)


@intrinsic
def lg2(typingctx, x):
    """lg2.approx.ftz.f32: log2(x), absolute error at most 2**-22 near 1; lg2(0) = -inf. Stand-in: sim.approx.lg2."""
    return asm.scalars("lg2.approx.ftz.f32 $0, $1;", types.float32(types.float32), effect=False)


@intrinsic
def rcp(typingctx, x):
    """rcp.approx.ftz.f32: 1 / x, at most 1 ulp off; rcp(inf) = 0. Stand-in: sim.approx.rcp."""
    return asm.scalars("rcp.approx.ftz.f32 $0, $1;", types.float32(types.float32), effect=False)


@intrinsic
def ceil(typingctx, x):
    """cvt.rpi.f32.f32: the smallest whole number that is not below x (PTX ISA 9.7.9.21). Stand-in: sim.approx.ceil."""
    return asm.scalars("cvt.rpi.f32.f32 $0, $1;", types.float32(types.float32), effect=False)


@intrinsic
def ceil_f64(typingctx, x):
    """cvt.rpi.f64.f64: the smallest whole number that is not below x. Stand-in: sim.approx.ceil_f64."""
    return asm.scalars("cvt.rpi.f64.f64 $0, $1;", types.float64(types.float64), effect=False)
