"""ldmatrix: 8 x 8 matrices of 16-bit elements from shared memory to the registers mma wants (PTX ISA 9.7.14.5.15).

cc 7.5. All 32 lanes of a warp take part. Lane 8 * i + r gives the shared address of row r of matrix i
(16 bytes, a multiple of 16); for x1 the addresses of lanes 8 to 31 and for x2 of 16 to 31 are ignored.
Register i of a lane then holds two neighbours of matrix i: row lane // 4, columns 2 * (lane % 4) and the
next; with trans row and column change places. It reads like a plain load: what cp.async wrote must have
been waited for, and what other threads wrote lies behind a barrier.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


def _ldmatrix(count, trans):
    text = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 {asm.braces(0, count)}, [${count}];"
    )

    @intrinsic
    def ldmatrix(typingctx, registers, at, address):
        """registers[at : at + count] (local uint32) = matrices at the lanes' shared addresses."""

        def codegen(context, builder, signature, args):
            registers = asm.Registers(builder, args[0], args[1], count)
            asm.emit(builder, text, [registers], [args[2]])
            return context.get_dummy_value()

        return types.void(registers, types.int32, types.int32), codegen

    return ldmatrix


x1, x2, x4 = _ldmatrix(1, False), _ldmatrix(2, False), _ldmatrix(4, False)
x1_trans, x2_trans, x4_trans = _ldmatrix(1, True), _ldmatrix(2, True), _ldmatrix(4, True)
