"""wgmma: the tensor cores of Hopper, one warpgroup at a time, asynchronously (PTX ISA 9.7.15). cc 9.0a.

The 128 threads of a warpgroup (four warps, the first a multiple of four) take part, together. A product
multiplies A (64 x 16 a step, from shared memory or registers) by B (16 x n, from shared memory) and adds it
to accumulators in registers. It runs on its own: its accumulators and register operands may not be touched
and its shared memory not overwritten until wait_group; the assembler serialises products it cannot prove
untouched (warnings C7510 to C7519). `pin` after the wait tells the compiler that the accumulators changed.

Every register the first product of a group reads or updates must be settled by `fence`; a whole tile's
product does that itself, in its asm block. Shared operands written by ordinary stores need fence.proxy_async
and a barrier before; what TMA brought needs the wait on its mbarrier.

Which element each register of each lane holds, and what a descriptor means: ptx/fragments.py.
"""

import functools

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


@intrinsic
def commit_group(typingctx):
    """wgmma.commit_group.sync.aligned: the warpgroup's products since the last commit are a group."""
    return asm.scalars("wgmma.commit_group.sync.aligned;", types.void())


@functools.cache
def wait_group(newest):
    """-> a function that waits until all but the `newest` newest groups are done: wgmma.wait_group.sync.aligned."""

    @intrinsic
    def wait(typingctx):
        return asm.scalars(f"wgmma.wait_group.sync.aligned {newest};", types.void())

    return wait


@functools.cache
def pin(count, first=0):
    """-> a function that ties `count` elements of a local array to their registers at this point; no instruction.

    After wait_group, so that the compiler neither reads the accumulators before the wait nor keeps copies. Before a
    product, so that what was computed with others' accumulators is done by then, and their registers are free. first:
    the first of the elements.
    """

    @intrinsic
    def pin(typingctx, registers):
        def codegen(context, builder, signature, args):
            pinned = asm.Registers(builder, args[0], ir.Constant(asm.i32, first), count)
            asm.emit(builder, "", [pinned], updates=True)
            return context.get_dummy_value()

        return types.void(registers), codegen

    return pin


def _text(n, kind, count, a_of_step, b_offsets, b_trans, b, accumulate, a_extra):
    """The asm block of one tile product: wgmma.fence, then one wgmma a step; only the first may overwrite. accumulate:
    the operand that says whether it does not, or "0"."""
    lines = ["{", ".reg .pred p;", ".reg .b64 da, db;", "wgmma.fence.sync.aligned;"]
    for step, b_offset in enumerate(b_offsets):
        if step < 2:
            lines.append(f"setp.ne.b32 p, {accumulate if step == 0 else '1'}, 0;")
        a, setup = a_of_step(step)
        lines += [*setup, f"add.s64 db, ${b}, {b_offset};"]
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} "
            f"{asm.braces(0, count)}, {a}, db, p, 1, 1{a_extra}, {b_trans};"
        )
    return "\n".join([*lines, "}"])


def _shared_text(n, kind, a_offsets, b_offsets, b_trans, accumulate):
    def a_of_step(step):
        return "da", [f"add.s64 da, ${n // 2}, {a_offsets[step]};"]

    return _text(n, kind, n // 2, a_of_step, b_offsets, b_trans, n // 2 + 1, accumulate, ", 0")


def _registers_text(n, kind, a_steps, b_offsets, b_trans, accumulate):
    def a_of_step(step):
        return asm.braces(n // 2 + a_steps[step], 4), []

    return _text(n, kind, n // 2, a_of_step, b_offsets, b_trans, n // 2 + max(a_steps) + 4, accumulate, "")


@functools.cache
def product_shared(n, kind, a_offsets, b_offsets, b_trans):
    """-> f(acc, a, b, accumulate): acc (64 x n) = A . B (+ acc), A and B in shared memory.

    One asm block with a wgmma.mma_async.sync.aligned.m64n{n}k16 for each step of 16 along the inner
    dimension. acc: local float32 array of n / 2; a, b: descriptors (uint64) of the first step;
    a_offsets, b_offsets: what is added to them for each step, in units of 16 bytes; accumulate: 0
    overwrites acc. kind: "f16" or "bf16". b_trans: 1 when B lies n-contiguous ("MN-major"), 0 when
    k-contiguous. A is k-contiguous. Then commit_group, and wait_group before anyone touches acc.
    """
    count = n // 2
    text = _shared_text(n, kind, a_offsets, b_offsets, b_trans, f"${count + 2}")

    @intrinsic
    def product(typingctx, acc, a, b, accumulate):
        def codegen(context, builder, signature, args):
            acc = asm.Registers(builder, args[0], asm.start(), count)
            asm.emit(builder, text, [acc], list(args[1:]), updates=True)
            return context.get_dummy_value()

        return types.void(acc, types.uint64, types.uint64, types.int32), codegen

    return product


@functools.cache
def product_registers(n, kind, b_offsets, b_trans):
    """-> f(acc, a, b, accumulate): the same with A in registers: a is a local uint32 array, 4 a step."""
    count = n // 2
    a_count = 4 * len(b_offsets)
    a_steps = tuple(range(0, a_count, 4))
    text = _registers_text(n, kind, a_steps, b_offsets, b_trans, f"${count + a_count + 1}")

    @intrinsic
    def product(typingctx, acc, a, b, accumulate):
        def codegen(context, builder, signature, args):
            acc = asm.Registers(builder, args[0], asm.start(), count)
            a = asm.Registers(builder, args[1], asm.start(), a_count)
            asm.emit(builder, text, [acc], [*a.load(), args[2], args[3]], updates=True)
            return context.get_dummy_value()

        return types.void(acc, a, types.uint64, types.int32), codegen

    return product


@functools.cache
def new_product_shared(n, kind, a_offsets, b_offsets, b_trans):
    """-> f(acc, a, b): product_shared that overwrites acc and does not read it, so acc needs no registers before it.
    acc is an in/out operand although it is not read: otherwise ptxas assigns new registers to each product."""
    text = _shared_text(n, kind, a_offsets, b_offsets, b_trans, "0")

    @intrinsic
    def product(typingctx, acc, a, b):
        def codegen(context, builder, signature, args):
            acc = asm.Registers(builder, args[0], asm.start(), n // 2)
            asm.emit(builder, text, [acc], list(args[1:]), updates=True)
            return context.get_dummy_value()

        return types.void(acc, types.uint64, types.uint64), codegen

    return product


@functools.cache
def new_product_registers(n, kind, a_steps, b_offsets, b_trans):
    """-> f(acc, a, b): likewise with A in registers. a_steps: where in a the four of each step begin; several steps may
    take the same."""
    a_count = max(a_steps) + 4
    text = _registers_text(n, kind, a_steps, b_offsets, b_trans, "0")

    @intrinsic
    def product(typingctx, acc, a, b):
        def codegen(context, builder, signature, args):
            acc = asm.Registers(builder, args[0], asm.start(), n // 2)
            a = asm.Registers(builder, args[1], asm.start(), a_count)
            asm.emit(builder, text, [acc], [*a.load(), args[2]], updates=True)
            return context.get_dummy_value()

        return types.void(acc, a, types.uint64), codegen

    return product


@functools.cache
def descriptor(leading_bytes, stride_bytes, swizzle_bytes):
    """-> f(address): the 64-bit descriptor of a shared operand that begins at that address (PTX ISA 9.7.15.5.1.2.2).

    leading_bytes and stride_bytes: distances between the operand's core matrices (fragments.py says which);
    swizzle_bytes: 0, 32, 64 or 128. A swizzled tile begins at a multiple of 8 swizzled rows (1024 for 128).
    """
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle_bytes]
    fixed = mode << 62 | (stride_bytes >> 4) << 32 | (leading_bytes >> 4) << 16

    @intrinsic
    def describe(typingctx, address):
        def codegen(context, builder, signature, args):
            part = builder.lshr(builder.and_(args[0], ir.Constant(asm.i32, 0x3FFFF)), ir.Constant(asm.i32, 4))
            return builder.or_(builder.zext(part, asm.i64), ir.Constant(asm.i64, fixed))

        return types.uint64(types.int32), codegen

    return describe
