"""mma.sync: the tensor cores, one warp at a time (PTX ISA 9.7.14.5). cc 8.0, but 9.0 for m16n8k16 of float64.

All 32 lanes of a warp take part, together, with the same arguments. It is synchronous: the result is
there when the instruction is done; it orders no memory. Which element of A (row), B (column) and C each register of
each lane holds: ptx/fragments.py.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


def _m16n8k16(kind):
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        f"{asm.braces(0, 4)}, {asm.braces(4, 4)}, {asm.braces(8, 2)}, {asm.braces(0, 4)};"
    )

    @intrinsic
    def m16n8k16(typingctx, acc, acc_at, a, a_at, b, b_at):
        """acc[acc_at : +4] += a[a_at : +4] . b[b_at : +2]: mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32.

        acc: local float32 array; a and b: local uint32 arrays, two 16-bit values in each. Products are
        exact, the sum is float32. Stand-in: the function of the same name in sim.mma.
        """
        return _product(text, 4, 4, 2, acc, acc_at, a, a_at, b, b_at)

    return m16n8k16


def _product(text, c_count, a_count, b_count, acc, acc_at, a, a_at, b, b_at):
    """The signature and the code of an instruction that adds a product of so many registers to its accumulators."""

    def codegen(context, builder, signature, args):
        acc = asm.Registers(builder, args[0], args[1], c_count)
        a = asm.Registers(builder, args[2], args[3], a_count)
        b = asm.Registers(builder, args[4], args[5], b_count)
        asm.emit(builder, text, [acc], a.load() + b.load(), updates=True, effect=False)
        return context.get_dummy_value()

    return types.void(acc, types.int32, a, types.int32, b, types.int32), codegen


m16n8k16_f16 = _m16n8k16("f16")
m16n8k16_bf16 = _m16n8k16("bf16")


@intrinsic
def m16n8k8_tf32(typingctx, acc, acc_at, a, a_at, b, b_at):
    """acc[acc_at : +4] += a[a_at : +4] . b[b_at : +2]: mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32.

    acc: local float32 array; a and b: local uint32 arrays, float32 numbers of which the lowest 13 bits are ignored.
    Products are exact. The sum is float32; how it is rounded PTX leaves open, and GPUs cut it off.
    """
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        f"{asm.braces(0, 4)}, {asm.braces(4, 4)}, {asm.braces(8, 2)}, {asm.braces(0, 4)};"
    )
    return _product(text, 4, 4, 2, acc, acc_at, a, a_at, b, b_at)


@intrinsic
def m16n8k16_f64(typingctx, acc, acc_at, a, a_at, b, b_at):
    """acc[acc_at : +4] += a[a_at : +8] . b[b_at : +4]: mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64.rn. cc 9.0.

    Local float64 arrays. Each step of the sum is rounded to nearest.
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f64.f64.f64.f64.rn "
        f"{asm.braces(0, 4)}, {asm.braces(4, 8)}, {asm.braces(12, 4)}, {asm.braces(0, 4)};"
    )
    return _product(text, 4, 8, 4, acc, acc_at, a, a_at, b, b_at)


@intrinsic
def m8n8k4_f64(typingctx, acc, acc_at, a, a_at, b, b_at):
    """acc[acc_at : +2] += a[a_at] . b[b_at], 8 x 4 by 4 x 8: mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64.rn.

    Local float64 arrays. Each step of the sum is rounded to nearest.
    """
    text = (
        "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64.rn "
        f"{asm.braces(0, 2)}, {asm.braces(2, 1)}, {asm.braces(3, 1)}, {asm.braces(0, 2)};"
    )
    return _product(text, 2, 1, 1, acc, acc_at, a, a_at, b, b_at)
