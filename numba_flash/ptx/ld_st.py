"""ld.shared and st.shared by address (PTX ISA 9.7.9.8 and 9.7.9.11).

Any compute capability; any thread; plain accesses, ordered by barriers only. Reading what the
asynchronous proxy wrote (TMA) needs the wait on its mbarrier; writing what it or wgmma reads next needs
fence.proxy_async in the writing threads and then a barrier.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def load_b32(typingctx, address):
    """ld.shared.b32: 4 bytes at a shared address (a multiple of 4). Stand-in: sim.ld_st.load_b32."""
    return asm.scalars("ld.shared.b32 $0, [$1];", types.uint32(types.int32))


@intrinsic
def store_b32(typingctx, address, value):
    """st.shared.b32: 4 bytes to a shared address (a multiple of 4). Stand-in: sim.ld_st.store_b32."""
    return asm.scalars("st.shared.b32 [$0], $1;", types.void(types.int32, types.uint32))


@intrinsic
def load_v4(typingctx, values, at, address):
    """ld.shared.v4.b32: values[at : at + 4] (local uint32) = 16 bytes at a shared address, a multiple of 16."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[0], args[1], 4)
        asm.emit(builder, f"ld.shared.v4.b32 {asm.braces(0, 4)}, [$4];", [values], [args[2]])
        return context.get_dummy_value()

    return types.void(values, types.int32, types.int32), codegen


@intrinsic
def store_v2(typingctx, address, values, at):
    """st.shared.v2.b32: 8 bytes at a shared address, a multiple of 8, = values[at : at + 2] (local uint32)."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 2)
        asm.emit(builder, f"st.shared.v2.b32 [$0], {asm.braces(1, 2)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int32, values, types.int32), codegen


@intrinsic
def store_v4(typingctx, address, values, at):
    """st.shared.v4.b32: 16 bytes at a shared address, a multiple of 16, = values[at : at + 4] (local uint32)."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 4)
        asm.emit(builder, f"st.shared.v4.b32 [$0], {asm.braces(1, 4)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int32, values, types.int32), codegen


@intrinsic
def store_v2_f64(typingctx, address, values, at):
    """st.shared.v2.f64: 16 bytes at a shared address, a multiple of 16, = values[at : at + 2] (local float64)."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 2)
        asm.emit(builder, f"st.shared.v2.f64 [$0], {asm.braces(1, 2)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int32, values, types.int32), codegen


@intrinsic
def load_f64(typingctx, address):
    """ld.shared.f64: 8 bytes at a shared address, a multiple of 8."""
    return asm.scalars("ld.shared.f64 $0, [$1];", types.float64(types.int32))


@intrinsic
def load_v2_f64(typingctx, values, at, address):
    """ld.shared.v2.f64: values[at : at + 2] (local float64) = 16 bytes at a shared address, a multiple of 16."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[0], args[1], 2)
        asm.emit(builder, f"ld.shared.v2.f64 {asm.braces(0, 2)}, [$2];", [values], [args[2]])
        return context.get_dummy_value()

    return types.void(values, types.int32, types.int32), codegen
