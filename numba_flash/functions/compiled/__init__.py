"""The numbers of a user's function where Numba compiles it, for a GPU or for the CPU: types, and code by rules.py.

Plain numbers would not do. Numba makes float64 of a float32 and any whole number, and of whole / whole, and Python's
constants are float64: a kernel in float32 would compute in float64, at 1/64 of the speed on most GPUs. A Number is a
whole number, a real one, or a real one with its derivative (dual), that knows the type to compute in.

The function is built anew with stand-ins for builtins and math (function.py), which this file types and lowers. Nothing
here is compiled from Python: an operation becomes LLVM instructions at once, so a function compiles in a tenth of a
second.
"""

from typing import Any

from numba.core import cgutils, errors, types
from numba.core.extending import intrinsic
from numba.core.typing import signature

from .. import NARROW
from ..failures import MARK
from ..function import Function
from . import operators  # noqa: F401 - registers them with Numba
from .code import Code
from .number_types import ANY, BASES, READS as READS, Number, Table, is_truth, kind_of, words
from .stand_ins import stand_ins as stand_ins
from .tables import scope_of_scores as scope_of_scores


def as_number(kind: str, base_name: str, narrow: bool = False) -> Any:
    """-> number(x): x as a Number; a dual one has the derivative 1. narrow: a whole one lies in 0 to NARROW. So it is
    no index that counts from the end, and it and most results computed from it are int32."""
    base = BASES[base_name]

    @intrinsic
    def number(typingctx: Any, x: Any) -> Any:
        t = Number(kind, base, (0, NARROW) if narrow and kind == "whole" else ANY)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            if kind == "whole":
                return code.made(t, code.whole(sig.args[0], args[0]))
            x = code.of(sig.args[0], args[0]).x.value
            return code.made(t, x, code.one.value)

        return signature(t, x), codegen

    return number


def as_positions(base_name: str, narrow: bool) -> tuple[Any, Any]:
    """-> (query(q_pos, ahead), key(k_pos)): both as whole Numbers of their side; ahead: q_pos - k_pos."""
    base = BASES[base_name]
    query_type, key_type = (Number("whole", base, (0, NARROW) if narrow else ANY, x) for x in ("query", "key"))

    @intrinsic
    def query(typingctx: Any, q_pos: Any, ahead: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            made = cgutils.create_struct_proxy(query_type)(context, builder)
            x, away = (code.whole(t, value) for t, value in zip(sig.args, args, strict=True))
            made.x, made.ahead = (code.resized(value, made.x.type) for value in (x, away))
            return made._getvalue()

        return signature(query_type, q_pos, ahead), codegen

    @intrinsic
    def key(typingctx: Any, k_pos: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            return code.made(key_type, code.whole(sig.args[0], args[0]))

        return signature(key_type, k_pos), codegen

    return query, key


def as_position(base_name: str, narrow: bool) -> Any:
    """-> position(q_pos): q_pos as a whole Number of the side "position"."""
    t = Number("whole", BASES[base_name], (0, NARROW) if narrow else ANY, "position")

    @intrinsic
    def position(typingctx: Any, q_pos: Any) -> Any:
        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, t.base)
            return code.made(t, code.whole(sig.args[0], args[0]))

        return signature(t, q_pos), codegen

    return position


def as_table(dtype: str, ndim: int, base_name: str, narrow: bool = False) -> Any:
    """-> table(pointer, sizes): the array at a pointer; sizes: its shape, and behind it its strides in elements.
    narrow: as in Table."""
    base = BASES[base_name]

    @intrinsic
    def table(typingctx: Any, pointer: Any, sizes: Any) -> Any:
        t = Table(dtype, pointer.dtype, ndim, base, narrow=narrow)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            numbers = cgutils.unpack_tuple(builder, args[1])
            made = cgutils.create_struct_proxy(t)(context, builder)
            made.data = args[0]
            made.shape, made.strides = (
                context.make_tuple(builder, types.UniTuple(types.int64, ndim), part)
                for part in (numbers[:ndim], numbers[ndim : 2 * ndim])  # there are two also without dimensions
            )
            return made._getvalue()

        return signature(t, pointer, sizes), codegen

    return table


def as_recorded_table(dtype: str, ndim: int, base_name: str) -> Any:
    """-> table(pointer, sizes, first, reads): an array that records its reads. first: the number of the sum for its
    first element; the sums for the others follow in the order of indices. reads: READS, a local array."""
    base = BASES[base_name]

    @intrinsic
    def table(typingctx: Any, pointer: Any, sizes: Any, first: Any, reads: Any) -> Any:
        t = Table(dtype, pointer.dtype, ndim, base, recorded=True)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            numbers, whole = cgutils.unpack_tuple(builder, args[1]), types.UniTuple(types.int64, ndim)
            made, step = cgutils.create_struct_proxy(t)(context, builder), context.get_constant(types.int64, 1)
            steps = []
            for size in reversed(numbers[:ndim]):
                steps.append(step)
                step = builder.mul(step, size)
            made.data, made.terms = args[0], context.cast(builder, args[2], sig.args[2], types.int64)
            made.shape, made.strides, made.term_strides = (
                context.make_tuple(builder, whole, part)
                for part in (numbers[:ndim], numbers[ndim : 2 * ndim], steps[::-1])
            )
            made.state = args[3]
            return made._getvalue()

        return signature(t, pointer, sizes, first, reads), codegen

    return table


def result(option: str, base_name: str, function: Function) -> Any:
    """-> result(x): the function's result as a plain number of the computing type, or with its derivative."""
    base = BASES[base_name]

    @intrinsic
    def value(typingctx: Any, x: Any) -> Any:
        _check_score(option, function, x)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return Code(context, builder, base).of(sig.args[0], args[0]).x.value

        return signature(base.type, x), codegen

    return value


def derivative(option: str, base_name: str, function: Function) -> Any:
    """-> derivative(x): the derivative of the function's result."""
    base = BASES[base_name]

    @intrinsic
    def slope(typingctx: Any, x: Any) -> Any:
        _check_score(option, function, x)

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            found = code.of(sig.args[0], args[0]).d
            return code.zero.value if found is None else found.value

        return signature(base.type, x), codegen

    return slope


def truth_of(option: str, function: Function) -> Any:
    """-> truth(x): the truth of a mask function's result, for instance of `near or flags[i]`."""

    @intrinsic
    def truth(typingctx: Any, x: Any) -> Any:
        if kind_of(x) != "whole":
            raise errors.TypingError(
                f"{MARK}{option} must return True or False, but {function.where} returns {words(x)}"
            )

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            base = x.base if isinstance(x, Number) else BASES["float32"]
            return Code(context, builder, base).truth(sig.args[0], args[0])

        return signature(types.boolean, x), codegen

    return truth


def _check_score(option: str, function: Function, x: Any) -> None:
    if kind_of(x) is None or is_truth(x):
        raise errors.TypingError(f"{MARK}{option} must return a number, but {function.where} returns {words(x)}")
