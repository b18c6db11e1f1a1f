"""Arrays of one thread. If every index is a constant after unrolling, they lie in registers, otherwise in local memory.

A pointer stands for such an array. `cuda.local.array` gives a Numba array instead. A call passes that as seven values,
and each signed index is checked for being negative: kernels took a tenth longer to compile. Indices are not checked
here.
"""

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

try:
    from numba.cuda import cgutils
except ImportError:  # without numba-cuda, where only the simulator runs
    from numba.core import cgutils


@intrinsic
def array(typingctx, count, dtype):
    """array(count, dtype) -> a pointer to `count` elements of a Numba type, without values.

    count: a constant. Each call in the program is one array, also in a loop. Stand-in: sim.local.array.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None  # Numba asks again with the constant
    size, element = count.literal_value, dtype.dtype

    def codegen(context, builder, signature, args):
        kind = context.get_data_type(element)
        place = cgutils.alloca_once(builder, ir.ArrayType(kind, size), name="registers")
        return builder.bitcast(place, kind.as_pointer())

    return types.CPointer(element)(count, dtype), codegen
