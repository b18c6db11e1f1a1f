"""max.f32, one machine instruction, max.f64, a few, and min.NaN.f32, one (PTX ISA 9.7.3.11, 9.7.3.12).

Any compute capability, min.NaN from 8.0 on; any thread, no ordering.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def maximum(typingctx, x, y):
    """max.f32: the larger one; of a number and NaN the number. Python's max() is a comparison and a choice."""
    return asm.scalars("max.f32 $0, $1, $2;", types.float32(types.float32, types.float32), effect=False)


@intrinsic
def maximum_f64(typingctx, x, y):
    """max.f64: the larger one; of a number and NaN the number. Stand-in: sim.minmax.maximum_f64."""
    return asm.scalars("max.f64 $0, $1, $2;", types.float64(types.float64, types.float64), effect=False)


@intrinsic
def minimum_nan(typingctx, x, y):
    """min.NaN.f32: the smaller one; NaN if either is NaN. Stand-in: sim.minmax.minimum_nan."""
    return asm.scalars("min.NaN.f32 $0, $1, $2;", types.float32(types.float32, types.float32), effect=False)
