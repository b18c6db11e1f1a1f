"""Arrays and tuples that functions read: x[i], x.shape. Importing it registers them with Numba."""

import operator
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.extending import lower_builtin, lower_getattr
from numba.core.typing.templates import AttributeTemplate, infer_getattr

from ..checks import MIXED
from ..failures import AT_CONSTANTS, MARK, NOT_ITERABLE, NOT_WHOLE, too_many_numbers
from .code import Code
from .number_types import READS, Number, Table, Truth, constant_of, is_narrow, kind_of, within_of
from .operators import members_of, typed


def scope_of_scores(module: Any) -> Any:
    """LLVM's alias scope for the memory of scores, on a CPU."""
    domain = module.add_metadata(["numba_flash"])
    return module.add_metadata([module.add_metadata(["numba_flash scores", domain])])


def _load(code: Code, t: Table, pointer: Any) -> Any:
    """An element in the computing type."""
    builder, context = code.builder, code.context
    if t.dtype == "float16" and code.on_gpu:
        half = builder.load(builder.bitcast(pointer, ir.HalfType().as_pointer()))
        value = builder.fpext(half, code.zero.value.type)
        return code.made(Number("real", t.base), value)
    value = builder.load(pointer)
    if not code.on_gpu:
        value.set_metadata("noalias", scope_of_scores(builder.module))
    if t.dtype == "bfloat16":
        bits = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        value, found = builder.bitcast(bits, ir.FloatType()), types.float32
        return code.made(Number("real", t.base), context.cast(builder, value, found, t.base.type))
    if t.dtype == "float16":  # not every CPU has an instruction for it
        return code.made(Number("real", t.base), _from_half(code, value))
    if t.dtype == "bool":
        return code.made(Truth(t.base), builder.icmp_unsigned("!=", value, ir.Constant(value.type, 0)))
    number = _number_in(t)
    to = t.base.type if number.kind == "real" else types.int64
    return code.made(number, context.cast(builder, value, t.element, to))


def _from_half(code: Code, bits: Any) -> Any:
    """A float16 in the computing type. Scaling by 2^112 gives float32's exponent, also for subnormal numbers."""
    builder, i32 = code.builder, ir.IntType(32)
    bits = builder.zext(bits, i32)
    magnitude = builder.shl(builder.and_(bits, i32(0x7FFF)), i32(13))
    large = builder.fmul(builder.bitcast(magnitude, ir.FloatType()), ir.Constant(ir.FloatType(), 2.0**112))
    special = builder.or_(magnitude, i32(0x7F800000))  # infinite, or NaN
    is_special = builder.icmp_unsigned(">=", magnitude, i32(0x7C00 << 13))
    size = builder.select(is_special, special, builder.bitcast(large, i32))
    found = builder.bitcast(builder.or_(builder.shl(builder.and_(bits, i32(0x8000)), i32(16)), size), ir.FloatType())
    return code.context.cast(builder, found, types.float32, code.base.type)


def _read(t: Any, index: Any) -> Any:
    if isinstance(t, types.BaseTuple) and isinstance(index, Number):
        at = constant_of(index)
        if at is None or not -len(t) <= at < len(t):
            raise errors.TypingError(MARK + (AT_CONSTANTS if at is None else f"a tuple of {len(t)} has no [{at}]"))
        return members_of(t)[at]
    if not isinstance(t, Table):
        return None
    indices: list[Any] = members_of(index) if isinstance(index, types.BaseTuple) else [index]
    if any(kind_of(i) != "whole" for i in indices):
        raise errors.TypingError(f"{MARK}an aux array is read at {NOT_WHOLE}")
    if len(indices) > t.ndim:
        raise errors.TypingError(MARK + too_many_numbers(t.ndim, len(indices)))
    left = t.ndim - len(indices)
    if left:
        return Table(t.dtype, t.element, left, t.base, t.recorded, t.narrow, t.checked)
    if t.recorded:
        return Number("dual", t.base)
    return _number_in(t)


def _number_in(t: Table) -> Number:
    """The type of a number that is read."""
    if t.dtype == "bool":
        return Truth(t.base)
    if "float" in t.dtype:
        return Number("real", t.base)
    limits = np.iinfo("int64" if t.dtype == "uint64" else t.dtype)  # a larger number is taken modulo 2^64
    return Number("whole", t.base, (int(limits.min), int(limits.max)))


typed(operator.getitem, _read)


@lower_builtin(operator.getitem, types.BaseTuple, Number)
def _part(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    at = constant_of(sig.args[1])
    assert at is not None
    return builder.extract_value(args[0], at % len(sig.args[0]))


def _not_iterable(t: Any) -> None:
    if isinstance(t, Table):
        raise errors.TypingError(f"{MARK}{NOT_ITERABLE}")
    if isinstance(t, types.Tuple) and any(isinstance(x, Number) for x in members_of(t)):
        raise errors.TypingError(f"{MARK}{MIXED}")


typed("getiter", _not_iterable)
typed(operator.contains, lambda t, x: _not_iterable(t) if isinstance(t, Table) else None)


@lower_builtin(operator.getitem, Table, types.Any)
def _getitem(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    t, index = sig.args
    code = Code(context, builder, t.base)
    table = cgutils.create_struct_proxy(t)(context, builder, value=args[0])
    shape, strides = (cgutils.unpack_tuple(builder, x) for x in (table.shape, table.strides))
    if isinstance(index, types.BaseTuple):
        indices = zip(members_of(index), cgutils.unpack_tuple(builder, args[1]), strict=True)
    else:
        indices = zip([index], [args[1]], strict=True)
    size = ir.IntType(32 if t.narrow else 64)
    offset, count, zero = ir.Constant(size, 0), 0, ir.Constant(ir.IntType(64), 0)
    terms, term_strides = zero, (zero,) * t.ndim
    if t.recorded:
        terms, term_strides = (
            table.terms,
            cgutils.unpack_tuple(builder, table.term_strides),
        )
    for axis, (kind, value) in enumerate(indices):
        at = code.whole(kind, value, t.narrow and is_narrow(kind))
        length, first = code.resized(shape[axis], at.type), ir.Constant(at.type, 0)
        if within_of(kind)[0] < 0 and getattr(kind, "side", "") != "position":  # a negative index counts from the end
            at = builder.select(builder.icmp_signed("<", at, first), builder.add(at, length), at)
        if t.checked:
            compare = builder.icmp_signed if within_of(kind)[0] >= 0 else builder.icmp_unsigned
            is_outside = compare(">=", at, length)
            at, flag = builder.select(is_outside, first, at), builder.zext(is_outside, ir.IntType(32))
            builder.store(builder.or_(builder.load(table.outside), flag), table.outside)
        way = (code.resized(x, size) for x in (at, strides[axis]))
        offset, count = builder.add(offset, builder.mul(*way)), axis + 1
        if t.recorded:
            terms = builder.add(terms, builder.mul(at, term_strides[axis]))
    pointer = builder.gep(table.data, [code.resized(offset, zero.type)])
    if count == t.ndim:
        return (
            _recorded(code, t, _load(code, t, pointer), table.state, terms) if t.recorded else _load(code, t, pointer)
        )
    part = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    part.data = pointer
    part.shape = cgutils.pack_array(builder, shape[count:])
    part.strides = cgutils.pack_array(builder, strides[count:])
    if t.checked:
        part.outside = table.outside
    if t.recorded:
        part.terms, part.state = terms, table.state
        part.term_strides = cgutils.pack_array(builder, term_strides[count:])
    return part._getvalue()


def _recorded(code: Code, t: Table, found: Any, state: Any, terms: Any) -> Any:
    """An element as a dual number; updates READS."""
    builder, i64 = code.builder, ir.IntType(64)
    at = [builder.gep(state, [i64(number)]) for number in range(READS)]
    number = builder.load(at[0])
    hit = builder.icmp_signed("==", number, builder.load(at[1]))
    builder.store(builder.add(number, i64(1)), at[0])
    builder.store(builder.select(hit, terms, builder.load(at[2])), at[2])
    x = code.of(Number("real", t.base), found).x.value
    return code.made(Number("dual", t.base), x, builder.select(hit, code.one.value, code.zero.value))


@infer_getattr
class _TableAttributes(AttributeTemplate):
    key = Table

    def resolve_shape(self, t: Table) -> Any:
        return types.UniTuple(Number("whole", t.base), t.ndim)


@lower_getattr(Table, "shape")
def _shape(context: Any, builder: Any, t: Any, value: Any) -> Any:
    code = Code(context, builder, t.base)
    table = cgutils.create_struct_proxy(t)(context, builder, value=value)
    whole = Number("whole", t.base)
    sizes = [code.made(whole, x) for x in cgutils.unpack_tuple(builder, table.shape)]
    return context.make_tuple(builder, types.UniTuple(whole, t.ndim), sizes)
