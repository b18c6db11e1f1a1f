"""A caller's function as Python, in the oracle, and compiled by Numba: beside each other, without a kernel around it.

`compiled` has the types of kernels: those for CPUs, and, with narrow=True, those for GPUs, whose positions and reads of
arrays are int32. Their code is LLVM's, which runs here whatever it is for; what a GPU alone has, its instructions and
its functions of math, is not in it.
"""

import numpy as np
from numba import njit
from numba.core import types

from numba_flash.cpu.functions import AUX_ELEMENTS
from numba_flash.functions import compiled as numbers_compiled, numbers
from numba_flash.functions.function import Function

inner = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


def oracle(option, function, base, aux=()):
    """-> call(s, b, h, i, j): (value, derivative) of a score_mod, or the truth of a mask_mod."""
    own, real = Function.of(option, function), np.dtype(base).type
    tables = [numbers.Table(real, array) for array in aux]

    def score(s, b, h, i, j):
        with np.errstate(all="ignore"):
            y = numbers.score_of(own, real, s, (b, h, i, j, i), tables, True)
        return y.x, real(0) if y.d is None else y.d

    def mask(s, b, h, i, j):
        return numbers.mask_of(own, real, (b, h, i, j, i), tables)

    return score if option == "score_mod" else mask


def compiled(option, functions, base, aux=(), narrow=False):
    """-> call(number, s, b, h, i, j): the same of one of these functions, which are compiled together."""
    whole = numbers_compiled.as_number("whole", base, narrow)
    query, key = numbers_compiled.as_positions(base, narrow)
    dual, tables = numbers_compiled.as_number("dual", base), _tables(aux, base, narrow)
    names = dict(whole=whole, query=query, key=key, dual=dual, tables=tables)
    lines = ["def each(number, s, b, h, i, j):", "    where = (whole(b), whole(h), query(i, i - j), key(j)) + tables()"]
    for number, function in enumerate(functions):
        own = Function.of(option, function)
        names[f"call_{number}"] = inner(own.build(numbers_compiled.stand_ins(base), inner))
        lines.append(f"    if number == {number}:")
        if option == "score_mod":
            for name in ("result", "derivative"):
                names[f"{name}_{number}"] = getattr(numbers_compiled, name)(option, base, own)
            lines.append(f"        y{number} = call_{number}(*((dual(s),) + where))")
            lines.append(f"        return result_{number}(y{number}), derivative_{number}(y{number})")
        else:
            names[f"truth_{number}"] = numbers_compiled.truth_of(option, own)
            lines.append(f"        return truth_{number}(call_{number}(*where))")
    lines.append("    return s, s" if option == "score_mod" else "    return False")
    exec("\n".join(lines), names)
    each, real = njit(names["each"], error_model="numpy"), np.dtype(base).type
    return lambda number, s, *where: each(number, real(s), *map(int, where))


def _tables(aux, base, narrow):
    """-> tables(): a tuple of all arrays, whose addresses are constants."""

    @inner
    def tables():
        return ()

    for array in aux:
        tables = _one_more(tables, array, base, narrow)
    return tables


def _one_more(before, array, base, narrow):
    dtype = array.dtype.name
    element = getattr(types, AUX_ELEMENTS.get(dtype, dtype))
    table = numbers_compiled.as_table(dtype, array.ndim, base, narrow)
    sizes = (*array.shape, *(stride // array.itemsize for stride in array.strides))
    at, address = _pointer_to(element), array.ctypes.data

    @inner
    def tables():
        return before() + (table(at(address), sizes),)

    return tables


def _pointer_to(element):
    from numba.core.extending import intrinsic

    @intrinsic
    def at(typingctx, address):
        def generate(context, builder, sig, args):
            return builder.inttoptr(args[0], context.get_value_type(sig.return_type))

        return types.CPointer(element)(types.int64), generate

    return at
