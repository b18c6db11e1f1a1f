"""Stand-ins for builtins and for math: functions whose only use is to be looked up by Numba."""

import functools
import math
import types as python_types
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import errors, types
from numba.core.extending import lower_builtin
from numba.core.imputils import lower_constant
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global

from .. import rules
from ..function import MARK, OF_TUPLES
from . import within
from .code import Code
from .number_types import ANY, BASES, Number, fits, kind_of, result_of, within_of, words


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
        wanted = {None: "numbers", 1: "a number", 2: "two numbers"}[count]
        raise errors.TypingError(f"{MARK}{name}() takes {wanted} here, not ({', '.join(map(words, args))})")
    return kinds  # type: ignore[return-value]


class _Constant:
    """A whole number of a tuple, of which in a loop Numba would know no more than that it is an int64."""

    def __init__(self, value: int, t: Number):
        self.value, self._numba_type_ = value, t


@lower_constant(Number)
def _lower_constant(context: Any, builder: Any, t: Any, constant: Any) -> Any:
    kind = context.get_value_type(t)
    return kind([kind.elements[0](constant.value)])


def _of_tuples(base: Any, tree: Any) -> Any:
    """The tree of a tuple whose whole numbers know between which they all lie."""
    found = list(_whole_numbers(tree))
    if not found or not fits((min(found), max(found)), ANY):
        return tree
    return _with_constants(tree, Number("whole", base, (min(found), max(found))))


def _whole_numbers(tree: Any) -> Any:
    if tree[0] == "int":
        yield tree[1]
    for part in tree[1:] if tree[0] == "tuple" else ():
        yield from _whole_numbers(part)


def _with_constants(tree: Any, t: Number) -> Any:
    if tree[0] == "tuple":
        return ("tuple", *(_with_constants(part, t) for part in tree[1:]))
    return ("constant", _Constant(tree[1], t)) if tree[0] == "int" else tree


@functools.cache
def stand_ins(base_name: str) -> dict[Any, Any]:
    """For each computing type its own: a constant in math.exp(0.5) does not say which it is."""
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
            rounded = getattr(code, by)(code.of(sig.args[0], args[0]).x)
            return code.made(sig.return_type, builder.fptosi(rounded.value, ir.IntType(64)))

        def result(*args: Any) -> Any:
            (kind,) = _kinds(name, 1, args)
            return Number("whole", base, within_of(args[0]) if kind == "whole" else ANY)

        return _stand_in(name, result, lower)

    def asking(name: str) -> Any:
        def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            code = Code(context, builder, base)
            x = code.of(sig.args[0], args[0]).x
            if name == "isnan":
                return builder.fcmp_unordered("uno", x.value, x.value)
            size, inf = code.fabs(x).value, ir.Constant(x.value.type, math.inf)
            return builder.fcmp_ordered("==" if name == "isinf" else "<", size, inf)

        def result(*args: Any) -> Any:
            _kinds(name, 1, args)
            return types.boolean

        return _stand_in(name, result, lower)

    def extreme(name: str, rule: Any, sign: str, of_within: Any) -> Any:
        def result(*args: Any) -> Any:
            kinds = _kinds(name, None, args)
            if len(kinds) < 2:
                raise errors.TypingError(f"{MARK}{name}() takes two numbers or more here")
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
            return builder.fcmp_unordered("!=", code.of(sig.args[0], args[0]).x.value, code.zero.value)

        def result(*args: Any) -> Any:
            _kinds("bool", 1, args)
            return types.boolean

        return _stand_in("bool", result, lower)

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
        setattr(of_math, name, getattr(math, name))
    return {
        "math": of_math,
        "float": of_reals("float", 1, lambda a, f: a),
        "int": to_whole("int", "trunc"),
        "round": to_whole("round", "rint"),
        "bool": truth(),
        "min": extreme("min", rules.minimum, "<", within.least),
        OF_TUPLES: functools.partial(_of_tuples, base),
        "max": extreme("max", rules.maximum, ">", within.largest),
    }
