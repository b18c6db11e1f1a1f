"""Pointers and addresses of shared memory.

A Numba array carries its length, and a signed index into it is checked for being negative at every
access; a pointer is an address. In the inner loops that is the difference between one `ld.shared.v4`
and twenty instructions of index arithmetic (seen in the PTX of v2).
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

try:
    from numba.cuda.np import arrayobj
except ImportError:  # without numba-cuda, where only the simulator runs
    from numba.np import arrayobj

ALIGNMENT = 16  # bytes; lets neighbouring elements be read with one instruction


@intrinsic
def pointer(typingctx, array, offset):
    """pointer(array, offset) -> a pointer to array[offset], indexed like an array, never checked.

    array: dynamic shared memory from `cuda.shared.array(0, dtype)`, which starts at a multiple of 16
    bytes; offset: in elements, a multiple of 16 bytes too (the low address bits are dropped to tell
    the compiler so). Any thread, no ordering. Stand-in: sim.shared.pointer.
    """
    element = types.CPointer(array.dtype)

    def codegen(context, builder, signature, args):
        shared = _shared(context, builder, signature.args[0], args[0])
        address = builder.ptrtoint(builder.gep(shared, [args[1]]), ir.IntType(64))
        aligned = builder.and_(address, ir.Constant(ir.IntType(64), -ALIGNMENT))
        # Back to a generic pointer, Numba's only kind; the compiler still sees where it comes from.
        return builder.addrspacecast(builder.inttoptr(aligned, shared.type), shared.type.pointee.as_pointer())

    return element(array, types.int64), codegen


@intrinsic
def address(typingctx, array):
    """address(array) -> where a shared array begins, as the 32-bit address that PTX's .shared operands take.

    A `cvta.to.shared.u64` and its low half. Any thread, no ordering. Stand-in: sim.shared.address.
    """

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(_shared(context, builder, signature.args[0], args[0]), ir.IntType(32))

    return types.int32(array), codegen


def _shared(context, builder, array_type, array):
    data = arrayobj.make_array(array_type)(context, builder, array).data
    return builder.addrspacecast(data, data.type.pointee.as_pointer(3))
