"""stmatrix: 8 x 8 matrices of 16-bit elements from registers to shared memory (PTX ISA 9.7.14.5.16). cc 9.0.

The inverse of ldmatrix, with the same lanes, addresses and registers: lane 8 * i + r gives the shared
address of row r of matrix i. A plain store: other threads see it behind a barrier, the asynchronous
proxy (a TMA store) only after fence.proxy_async.
"""

from numba.cuda import types
from numba.cuda.extending import intrinsic

from . import asm


def _stmatrix(count, trans):
    text = f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 [$0], {asm.braces(1, count)};"

    @intrinsic
    def stmatrix(typingctx, address, registers, at):
        """Matrices at the lanes' shared addresses = registers[at : at + count] (local uint32)."""

        def codegen(context, builder, signature, args):
            registers = asm.Registers(builder, args[1], args[2], count)
            asm.emit(builder, text, [], [args[0], *registers.load()])
            return context.get_dummy_value()

        return types.void(types.int32, registers, types.int32), codegen

    return stmatrix


x1, x2, x4 = _stmatrix(1, False), _stmatrix(2, False), _stmatrix(4, False)
x1_trans, x2_trans, x4_trans = _stmatrix(1, True), _stmatrix(2, True), _stmatrix(4, True)
