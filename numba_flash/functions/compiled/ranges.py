"""range() in compiled functions: for loops and `x in range(...)`. Importing it registers it with Numba.

Numba's own range gives plain integers, whose operators are Numba's. Its `in` is False for other types than its
integer.
"""

import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.datamodel import models
from numba.core.extending import lower_builtin, register_model
from numba.core.imputils import call_getiter, call_iternext

from ..failures import MARK, NOT_WHOLE
from .code import Code
from .number_types import Number, Truth, Within, constant_of, kind_of, within_of
from .operators import typed

STATE, ITERATOR = types.range_state64_type, types.range_iter64_type  # Numba's own, within


class Range(types.SimpleIterableType):
    """within: the least and the largest of its numbers."""

    def __init__(self, base: Any, within: Within):
        self.number = Number("whole", base, within)
        super().__init__(f"range({self.number})", RangeIterator(self.number))


class RangeIterator(types.SimpleIteratorType):
    def __init__(self, number: Number):
        super().__init__(f"iter({number})", number)


@register_model(Range)
class _RangeModel(models.StructModel):
    def __init__(self, manager: Any, t: Range):
        super().__init__(manager, t, [(name, types.int64) for name in ("start", "stop", "step")])


@register_model(RangeIterator)
class _IteratorModel(models.StructModel):
    def __init__(self, manager: Any, t: RangeIterator):
        inside, place = types.int64, types.EphemeralPointer(types.int64)
        super().__init__(manager, t, [("iter", place), ("stop", inside), ("step", inside), ("count", place)])


def range_type(base: Any, args: Any) -> Range:
    """The type of range(*args)."""
    if not 0 < len(args) < 4 or any(kind_of(t) != "whole" for t in args):
        raise errors.TypingError(f"{MARK}range() takes {NOT_WHOLE}")
    ends = [(0, 0), *map(within_of, args)] if len(args) == 1 else list(map(within_of, args[:2]))
    return Range(base, (min(x[0] for x in ends), max(x[1] for x in ends)))


def make_range(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    code = Code(context, builder, sig.return_type.number.base)
    zero, one = (ir.Constant(ir.IntType(64), x) for x in (0, 1))
    ends = [code.whole(t, value) for t, value in zip(sig.args, args, strict=True)]
    start, stop = (zero, ends[0]) if len(ends) == 1 else ends[:2]
    step = ends[2] if len(ends) == 3 else one
    if len(ends) == 3 and not constant_of(sig.args[2]):  # a step of 0 makes no numbers: a kernel does not raise
        is_zero = builder.icmp_signed("==", step, zero)
        stop, step = builder.select(is_zero, start, stop), builder.select(is_zero, one, step)
    made = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    made.start, made.stop, made.step = start, stop, step
    return made._getvalue()


@lower_builtin("getiter", Range)
def _start(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return call_getiter(context, builder, STATE, args[0])


@lower_builtin("iternext", RangeIterator)  # CUDA ignores the result of Numba's own decorator, iternext_impl
def _next(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    number, made = sig.args[0].yield_type, context.make_helper(builder, sig.return_type)
    found = call_iternext(context, builder, ITERATOR, args[0])
    made.first = Code(context, builder, number.base).made(number, found.yielded_value())
    made.second = found.is_valid()
    return made._getvalue()


def _held(held: Any, x: Any) -> Any:
    if not isinstance(held, Range):
        return None
    if kind_of(x) != "whole":
        raise errors.TypingError(f"{MARK}range() has {NOT_WHOLE}")
    return Truth(held.number.base)


typed(operator.contains, _held)


@lower_builtin(operator.contains, Range, types.Any)
def _holds(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    held = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    code = Code(context, builder, sig.return_type.base)
    x = code.whole(sig.args[1], args[1])
    zero = ir.Constant(x.type, 0)

    def between(above: str, below: str) -> Any:
        return builder.and_(builder.icmp_signed(above, x, held.start), builder.icmp_signed(below, x, held.stop))

    rises = builder.icmp_signed(">", held.step, zero)
    on_a_step = builder.icmp_signed("==", builder.srem(builder.sub(x, held.start), held.step), zero)
    inside = builder.select(rises, between(">=", "<"), between("<=", ">"))
    return code.made(sig.return_type, builder.and_(inside, on_a_step))
