"""mma.sync: the tensor cores, one warp at a time (PTX ISA 9.7.14.5). cc 8.0 for these shapes and types.

All 32 lanes of a warp take part, together, with the same arguments. It is synchronous: the result is
there when the instruction is done; it orders no memory. Which element of A (16 x 16, row), B (16 x 8,
column) and C (16 x 8) each register of each lane holds: ptx/fragments.py.
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
        exact, the sum is float32. Twin: the function of the same name in sim.mma.
        """

        def codegen(context, builder, signature, args):
            acc = asm.Registers(context, builder, signature.args[0], args[0], args[1], 4)
            a = asm.Registers(context, builder, signature.args[2], args[2], args[3], 4)
            b = asm.Registers(context, builder, signature.args[4], args[4], args[5], 2)
            asm.emit(builder, text, [acc], a.load() + b.load(), updates=True, effect=False)
            return context.get_dummy_value()

        return types.void(acc, types.int32, a, types.int32, b, types.int32), codegen

    return m16n8k16


m16n8k16_f16 = _m16n8k16("f16")
m16n8k16_bf16 = _m16n8k16("bf16")
