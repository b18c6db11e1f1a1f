"""Stand-ins for builtins and for math: functions whose only use is to be looked up by Numba."""

import functools
import math
import operator
import types as python_types
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.extending import lower_builtin
from numba.core.imputils import lower_constant
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global

from .. import rules
from ..build import NUMBERS
from ..failures import MARK, takes
from . import within
from .code import Code
from .number_types import ANY, BASES, Number, Table, Truth, kind_of, result_of, within_of, words
from .ranges import make_range, range_type


def _stand_in(name: str, result: Callable[..., Any], lower: Any) -> Any:
    def function(*values: Any) -> Any:
        raise AssertionError("it is compiled, not called")

    function.__name__ = function.__qualname__ = name

    class Template(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            if kws:
                raise errors.TypingError(f"{MARK}{name}() takes no keywords here")
            return signature(result(*args), *args)

    Template.key = function  # type: ignore[attr-defined]
    infer_global(function, types.Function(Template))
    lower_builtin(function, types.VarArg(types.Any))(lower)
    return function


def _kinds(name: str, count: int | None, args: tuple[Any, ...]) -> tuple[str, ...]:
    kinds = tuple(map(kind_of, args))
    if None in kinds or (count is not None and len(args) != count) or not args:
        raise errors.TypingError(MARK + takes(name, count, map(words, args)))
    return kinds  # type: ignore[return-value]


class _Constant:
    """A number that is written in a function or captured by it. So Numba can decide an `if` at compile time."""

    def __init__(self, value: Any, t: Number):
        self.value, self._numba_type_ = value, t

    def __bool__(self) -> bool:
        return bool(self.value)

    # 2 and 2.0, or 2.0 of float32 and of float64, are equal but of different types. Numba takes equal defaults of
    # parameters for one; of those without a hash it compares the identity.
    __hash__ = None  # type: ignore[assignment]


def _asked(operation: Any) -> Any:
    return lambda self, other: operation(self.value, other.value if isinstance(other, _Constant) else other)


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_Constant, f"__{_name}__", _asked(getattr(operator, _name)))


@lower_constant(Number)
def _lower_constant(context: Any, builder: Any, t: Any, constant: Any) -> Any:
    kind = context.get_value_type(t)
    if isinstance(t, Truth):
        return kind(int(constant.value))
    return kind([kind.elements[0](constant.value)])


def _constants(base: Any, values: list[Any]) -> Any:
    """Converts NUMBERS: all integers of a tuple get one type, and all reals one, since loops over it need that."""
    wholes = [x for x in values if not isinstance(x, bool | float)]
    kinds: dict[Any, Number] = {bool: Truth(base), float: Number("real", base)}
    if wholes:
        kinds[int] = Number("whole", base, (min(wholes), max(wholes)))
    return lambda value: _Constant(value, kinds[type(value)])


@functools.cache
def stand_ins(base_name: str) -> dict[Any, Any]:
    """Each computing type has its own, because a constant as in math.exp(0.5) does not say its type."""
    base = BASES[base_name]

    def of_reals(name: str, count: int, rule: Any) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            return code.given(sig.return_type, rule(*map(code.of, sig.args, args), code))

        return _stand_in(name, lambda *args: result_of(_kinds(name, count, args), base), lower)

    def to_whole(name: str, by: str) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            if kind_of(sig.args[0]) == "whole":
                return code.made(sig.return_type, code.whole(sig.args[0], args[0]))
            return code.made(sig.return_type, _saturated(getattr(code, by)(code.of(sig.args[0], args[0]).x)))

        def result(*args: Any) -> Any:
            (kind,) = _kinds(name, 1, args)
            return Number("whole", base, within_of(args[0]) if kind == "whole" else ANY)

        return _stand_in(name, result, lower)

    def asking(name: str) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            x = code.of(sig.args[0], args[0]).x
            found = x != x if name == "isnan" else code.fabs(x)._ask("==" if name == "isinf" else "<", math.inf)
            return code.made(sig.return_type, found.value)

        def result(*args: Any) -> Any:
            _kinds(name, 1, args)
            return Truth(base)

        return _stand_in(name, result, lower)

    def extreme(name: str, rule: Any, sign: str, of_within: Any) -> Any:
        def result(*args: Any) -> Any:
            kinds = _kinds(name, None, args)
            if len(kinds) < 2:
                raise errors.TypingError(MARK + takes(name, None, map(words, args)))
            if set(kinds) == {"whole"}:
                return Number("whole", base, of_within(*map(within_of, args)))
            return result_of(kinds, base)

        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            if sig.return_type.kind == "whole":
                values = code.wholes(sig, args)
                found = values[0]
                for x in values[1:]:
                    found = builder.select(builder.icmp_signed(sign, x, found), x, found)
                return code.made(sig.return_type, found)
            pairs = list(map(code.of, sig.args, args))
            best = pairs[0]
            for pair in pairs[1:]:
                best = rule(best, pair, code)
            return code.given(sig.return_type, best)

        return _stand_in(name, result, lower)

    def truth() -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            return code.made(sig.return_type, code.truth(sig.args[0], args[0]))

        def result(*args: Any) -> Any:
            _kinds("bool", 1, args)
            return Truth(base)

        return _stand_in("bool", result, lower)

    def length() -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            (t,) = sig.args
            if not isinstance(t, Table):
                return context.get_constant_generic(builder, sig.return_type, _Constant(len(t), sig.return_type))
            table = cgutils.create_struct_proxy(t)(context, builder, value=args[0])
            return Code(context, builder, base).made(sig.return_type, builder.extract_value(table.shape, 0))

        def result(*args: Any) -> Any:
            if len(args) != 1 or not isinstance(args[0], Table | types.BaseTuple):
                raise errors.TypingError(MARK + takes("len", 0, map(words, args)))
            return Number("whole", base, ANY if isinstance(args[0], Table) else (len(args[0]),) * 2)

        return _stand_in("len", result, lower)

    of_math = python_types.ModuleType("math")
    for name in rules.SLOPES:
        setattr(of_math, name, of_reals(name, 1, functools.partial(rules.apply, name)))
    for name, rule in rules.MATH_BINARY.items():
        setattr(of_math, name, of_reals(name, 2, rule))
    of_math.fabs = of_reals("fabs", 1, rules.fabs)  # type: ignore[attr-defined]
    for name in rules.TO_WHOLE[:3]:
        setattr(of_math, name, to_whole(name, name))
    for name in rules.ASKING:
        setattr(of_math, name, asking(name))
    for name in rules.CONSTANTS:
        setattr(of_math, name, _constants(base, [getattr(math, name)])(getattr(math, name)))
    return {
        "math": of_math,
        "float": of_reals("float", 1, lambda a, f: a),
        "int": to_whole("int", "trunc"),
        "round": to_whole("round", "rint"),
        "bool": truth(),
        "len": length(),
        "range": _stand_in("range", lambda *args: range_type(base, args), make_range),
        "min": extreme("min", rules.minimum, "<", within.least),
        "max": extreme("max", rules.maximum, ">", within.largest),
        NUMBERS: functools.partial(_constants, base),
    }


def _saturated(x: Any) -> Any:
    """A real number without fraction as the nearest int64; NaN becomes 0. LLVM leaves what does not fit undefined."""
    code, i64 = x.code, ir.IntType(64)
    is_low, is_high = x < -(2.0**63), x._ask(">=", 2.0**63)
    inside = code.where(is_low, code.zero, code.where(is_high, code.zero, code.where(x != x, code.zero, x)))
    found = code.builder.fptosi(inside.value, i64)
    for condition, end in ((is_low, ANY[0]), (is_high, ANY[1])):
        found = code.builder.select(condition.value, i64(end), found)
    return found
