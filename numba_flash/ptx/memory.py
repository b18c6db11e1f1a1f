"""Addresses in global memory, and what goes by address (PTX ISA 9.7.9.8, 9.7.9.11, 9.7.13.5, 9.7.13.6).

An access by address moves up to 16 bytes at once, whatever the pointer's elements are. Any compute
capability; any thread; no ordering beyond what a plain load or store has, unless the name says so.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def address(typingctx, pointer, index):
    """address(pointer, index) -> the address of pointer[index] in global memory, int64.

    pointer: a kernel's pointer argument. Stand-in: sim.memory.address, which also notes whose memory it is.
    """

    def codegen(context, builder, signature, args):
        place = builder.gep(args[0], [args[1]])
        space = builder.addrspacecast(place, place.type.pointee.as_pointer(1))
        return builder.ptrtoint(space, ir.IntType(64))

    return types.int64(pointer, types.int64), codegen


@intrinsic
def load_v4(typingctx, values, at, address):
    """ld.global.v4.b32: values[at : at + 4] (local uint32) = 16 bytes at a global address, a multiple of 16."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[0], args[1], 4)
        asm.emit(builder, f"ld.global.v4.b32 {asm.braces(0, 4)}, [$4];", [values], [args[2]])
        return context.get_dummy_value()

    return types.void(values, types.int32, types.int64), codegen


@intrinsic
def load_b16_if(typingctx, address, condition):
    """@condition ld.global.u16: 2 bytes at a global address, a multiple of 2; 0 without reading where it is 0."""
    text = (
        "{ .reg .pred p; .reg .b16 half, zero; setp.ne.u32 p, $2, 0; mov.b16 half, 0; mov.b16 zero, 0; "
        "@p ld.global.b16 half, [$1]; mov.b32 $0, {half, zero}; }"
    )
    return asm.scalars(text, types.uint32(types.int64, types.uint32))


@intrinsic
def load_b32_if(typingctx, address, condition):
    """@condition ld.global.b32: 4 bytes at a global address, a multiple of 4; 0 without reading where it is 0."""
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }"
    return asm.scalars(text, types.uint32(types.int64, types.uint32))


@intrinsic
def load_v2_if(typingctx, values, at, address, condition):
    """@condition ld.global.v2.b32: values[at : at + 2] (local uint32) = 8 bytes at a global address, a multiple of 8;
    0 without reading where it is 0."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[0], args[1], 2)
        text = (
            "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.v2.b32 {$0, $1}, [$2]; }"
        )
        asm.emit(builder, text, [values], [args[2], args[3]])
        return context.get_dummy_value()

    return types.void(values, types.int32, types.int64, types.uint32), codegen


@intrinsic
def load_v4_if(typingctx, values, at, address, condition):
    """@condition ld.global.v4.b32: values[at : at + 4] (local uint32) = 16 bytes at a global address, a multiple of 16;
    0 without reading where it is 0."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[0], args[1], 4)
        zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(4))
        load = f"@p ld.global.v4.b32 {asm.braces(0, 4)}, [$4];"
        text = f"{{ .reg .pred p; setp.ne.u32 p, $5, 0; {zeros} {load} }}"
        asm.emit(builder, text, [values], [args[2], args[3]])
        return context.get_dummy_value()

    return types.void(values, types.int32, types.int64, types.uint32), codegen


@intrinsic
def load_f64_if(typingctx, address, condition):
    """@condition ld.global.f64: 8 bytes at a global address, a multiple of 8; 0 without reading where it is 0."""
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.f64 $0, 0d0000000000000000; @p ld.global.f64 $0, [$1]; }"
    return asm.scalars(text, types.float64(types.int64, types.uint32))


@intrinsic
def store_b16(typingctx, address, value):
    """st.global.b16 [address], value: the low 16 bits of value. address: a multiple of 2."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; st.global.b16 [$0], low; }"
    return asm.scalars(text, types.void(types.int64, types.uint32))


@intrinsic
def store_b32(typingctx, address, value):
    """st.global.b32 [address], value: 4 bytes. address: a multiple of 4."""
    return asm.scalars("st.global.b32 [$0], $1;", types.void(types.int64, types.uint32))


@intrinsic
def store_v2(typingctx, address, values, at):
    """st.global.v2.b32 [address], values[at : at + 2]: 8 bytes of a local uint32 array. address: a multiple of 8."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 2)
        asm.emit(builder, f"st.global.v2.b32 [$0], {asm.braces(1, 2)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int64, values, types.int32), codegen


@intrinsic
def store_v4(typingctx, address, values, at):
    """st.global.v4.b32 [address], values[at : at + 4]: 16 bytes of a local uint32 array. address: a multiple of 16."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 4)
        asm.emit(builder, f"st.global.v4.b32 [$0], {asm.braces(1, 4)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int64, values, types.int32), codegen


@intrinsic
def store_v2_f64(typingctx, address, values, at):
    """st.global.v2.f64 [address], values[at : at + 2]: 16 bytes of a local float64 array. address: a multiple of 16."""

    def codegen(context, builder, signature, args):
        values = asm.Registers(builder, args[1], args[2], 2)
        asm.emit(builder, f"st.global.v2.f64 [$0], {asm.braces(1, 2)};", [], [args[0], *values.load()])
        return context.get_dummy_value()

    return types.void(types.int64, values, types.int32), codegen


@intrinsic
def add(typingctx, address, value):
    """atom.global.add.u32: memory += value, -> what was there before. One thread; atomic on the whole GPU, unordered.

    address: a multiple of 4. cc 2.0. Stand-in: sim.memory.add.
    """
    return asm.scalars("atom.global.add.u32 $0, [$1], $2;", types.uint32(types.int64, types.uint32))


@intrinsic
def add_acq_rel(typingctx, address, value):
    """atom.acq_rel.gpu.global.add.u32: as add, behind all that this thread has done or waited for, and before all that
    it does next: what was done before earlier additions comes before that, too. cc 7.0. Stand-in:
    sim.memory.add_acq_rel.
    """
    return asm.scalars("atom.acq_rel.gpu.global.add.u32 $0, [$1], $2;", types.uint32(types.int64, types.uint32))


@intrinsic
def add_i64(typingctx, address, value):
    """red.global.add.u64: memory += value, modulo 2^64. One thread; atomic on the whole GPU, unordered.

    address: a multiple of 8. cc 2.0. Stand-in: sim.memory.add_i64.
    """
    return asm.scalars("red.global.add.u64 [$0], $1;", types.void(types.int64, types.int64))


@intrinsic
def maximum(typingctx, address, value):
    """red.global.max.u32: memory = max(memory, value). One thread; atomic on the whole GPU, unordered.

    address: a multiple of 4. cc 2.0. Stand-in: sim.memory.maximum.
    """
    return asm.scalars("red.global.max.u32 [$0], $1;", types.void(types.int64, types.uint32))


@intrinsic
def exchange(typingctx, address, value):
    """atom.global.exch.b32: memory = value, -> what was there before. One thread, atomic, unordered. cc 2.0."""
    return asm.scalars("atom.global.exch.b32 $0, [$1], $2;", types.uint32(types.int64, types.uint32))


@intrinsic
def load_acquire(typingctx, address):
    """ld.acquire.gpu.global.b32: 4 bytes. What the thread that released this value (add_release) had done before comes
    before what this one does next. cc 7.0. Stand-in: sim.memory.load_acquire.
    """
    return asm.scalars("ld.acquire.gpu.global.b32 $0, [$1];", types.uint32(types.int64))


@intrinsic
def add_release(typingctx, address, value):
    """red.release.gpu.global.add.u32: memory += value, behind all that this thread has done or waited for. cc 7.0."""
    return asm.scalars("red.release.gpu.global.add.u32 [$0], $1;", types.void(types.int64, types.uint32))
