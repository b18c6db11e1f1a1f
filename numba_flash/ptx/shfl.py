"""shfl.sync: values between the lanes of a warp (PTX ISA 9.7.9.6). cc 3.0.

All 32 lanes take part; no memory is ordered.
"""

from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def bfly_f32(typingctx, value, lane_mask):
    """shfl.sync.bfly.b32: the value of lane (own lane ^ lane_mask). float32. Stand-in: sim.shfl.bfly_f32."""
    text = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return asm.scalars(text, types.float32(types.float32, types.int32))


@intrinsic
def bfly_f64(typingctx, value, lane_mask):
    """Two shfl.sync.bfly.b32, one for each half of a float64. Stand-in: sim.shfl.bfly_f64."""
    text = (
        "{ .reg .b32 low, high; mov.b64 {low, high}, $1; shfl.sync.bfly.b32 low, low, $2, 0x1f, 0xffffffff; "
        "shfl.sync.bfly.b32 high, high, $2, 0x1f, 0xffffffff; mov.b64 $0, {low, high}; }"
    )
    return asm.scalars(text, types.float64(types.float64, types.int32))


@intrinsic
def bfly_b32(typingctx, value, lane_mask):
    """shfl.sync.bfly.b32 of a uint32. Stand-in: sim.shfl.bfly_b32."""
    text = "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return asm.scalars(text, types.uint32(types.uint32, types.int32))


@intrinsic
def idx_b32(typingctx, value, lane):
    """shfl.sync.idx.b32: the value of lane `lane`, uint32. The compiler then knows it is the same in all lanes."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return asm.scalars(text, types.uint32(types.uint32, types.int32))


@intrinsic
def idx_f32(typingctx, value, lane):
    """idx_b32 of a float32. Stand-in: sim.shfl.idx_f32."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;"
    return asm.scalars(text, types.float32(types.float32, types.int32))


@intrinsic
def idx_f64(typingctx, value, lane):
    """Two of them, one for each half of a float64. Stand-in: sim.shfl.idx_f64."""
    text = (
        "{ .reg .b32 low, high; mov.b64 {low, high}, $1; shfl.sync.idx.b32 low, low, $2, 0x1f, 0xffffffff; "
        "shfl.sync.idx.b32 high, high, $2, 0x1f, 0xffffffff; mov.b64 $0, {low, high}; }"
    )
    return asm.scalars(text, types.float64(types.float64, types.int32))


@intrinsic
def sum_s32(typingctx, value):
    """redux.sync.add.s32: the sum over all lanes, in every lane (PTX ISA 9.7.13.12). cc 8.0. Stand-in:
    sim.shfl.sum_s32."""
    return asm.scalars("redux.sync.add.s32 $0, $1, 0xffffffff;", types.int32(types.int32))


@cuda.jit(device=True, forceinline=True)
def sum_f32(value):
    """The sum over all lanes, in every lane: pairs of neighbours first. float32. Stand-in: sim.shfl.sum_f32."""
    for distance in (1, 2, 4, 8, 16):
        value += bfly_f32(value, distance)
    return value


@cuda.jit(device=True, forceinline=True)
def sum_f64(value):
    """Likewise of float64. Stand-in: sim.shfl.sum_f64."""
    for distance in (1, 2, 4, 8, 16):
        value += bfly_f64(value, distance)
    return value
