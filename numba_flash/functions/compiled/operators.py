"""Python's operators of Numbers, and what becomes of plain numbers beside them. Importing it tells Numba."""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import errors, types
from numba.core.extending import lower_builtin, lower_cast
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer_global

from .. import rules
from ..function import MARK
from . import within
from .code import Code
from .number_types import Number, Table, kind_of, result_of, within_of


def typed(key: Any, result: Callable[..., Any]) -> None:
    """Numba asks result(*types) for the type that key(...) gives; None where it is no affair of this file's."""

    class Template(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            t = None if kws else result(*args)
            return None if t is None else signature(t, *args)

    Template.key = key  # type: ignore[attr-defined]
    infer_global(key)(Template)


def numbers_of(*args: Any) -> tuple[tuple[str, ...], Any] | None:
    """Kinds and the computing type, where one at least is a Number and all are numbers."""
    kinds = tuple(map(kind_of, args))
    bases = [t.base for t in args if isinstance(t, Number)]
    if any(isinstance(t, Table) for t in args):
        raise errors.TypingError(f"{MARK}an aux array is read, as x[i], before it is computed with")
    return (kinds, bases[0]) if bases and None not in kinds else None  # type: ignore[return-value]


def _register_binary(name: str) -> None:
    rule, plain = rules.BINARY[name], getattr(operator, name)

    def result(a: Any, b: Any) -> Any:
        found = numbers_of(a, b)
        if found is None:
            return None
        kinds, base = found
        if kinds == ("whole", "whole") and name != "truediv" and not (name == "pow" and _negative(b)):
            return Number("whole", base, within.of_binary(name, within_of(a), within_of(b)))
        return Number("real", base) if name == "floordiv" else result_of(kinds, base)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (a, b) = Code(context, builder, sig.return_type.base), sig.args
        if sig.return_type.kind == "whole":
            if name == "pow" and isinstance(b, types.IntegerLiteral):
                return code.made(sig.return_type, _whole_power(builder, code.whole(a, args[0]), b.literal_value))
            difference = code.difference(sig, args) if name == "sub" else None
            if difference is not None:
                return code.made(sig.return_type, difference)
            if name in ("add", "sub", "mul"):
                flags = ("nsw",) * sig.return_type.narrow
                return code.made(sig.return_type, getattr(builder, name)(*code.wholes(sig, args), flags=flags))
            of_whole = context.get_function(plain, signature(types.int64, types.int64, types.int64))
            return code.made(sig.return_type, of_whole(builder, [code.whole(a, args[0]), code.whole(b, args[1])]))
        if name == "pow" and isinstance(b, types.IntegerLiteral):
            return code.given(sig.return_type, rules.whole_power(code.of(a, args[0]), b.literal_value, code))
        return code.given(sig.return_type, rule(code.of(a, args[0]), code.of(b, args[1]), code))

    for key in (plain, getattr(operator, f"i{name}")):
        typed(key, result)
        lowered(key, lower)


def lowered(key: Any, lower: Any) -> None:
    """For two arguments, of which one at least is a Number."""
    for pattern in ((Number, Number), (Number, types.Any), (types.Any, Number)):
        lower_builtin(key, *pattern)(lower)


def _negative(t: Any) -> bool:
    return isinstance(t, types.IntegerLiteral) and t.literal_value < 0


def _whole_power(builder: Any, x: Any, exponent: int) -> Any:
    found = ir.Constant(x.type, 1)
    for _ in range(exponent):
        found = builder.mul(found, x)
    return found


def _register_comparing(name: str, sign: str) -> None:
    key = getattr(operator, name)
    typed(key, lambda a, b: types.boolean if numbers_of(a, b) else None)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        (kinds, base), (a, b) = numbers_of(*sig.args), sig.args  # type: ignore[misc]
        code = Code(context, builder, base)
        difference = code.difference(sig, args)
        if difference is not None:
            return builder.icmp_signed(sign, difference, ir.Constant(difference.type, 0))
        if kinds == ("whole", "whole"):
            return builder.icmp_signed(sign, *code.wholes(sig, args))
        compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        return compare(sign, code.of(a, args[0]).x.value, code.of(b, args[1]).x.value)

    lowered(key, lower)


def _register_of_bits(name: str) -> None:
    def result(a: Any, b: Any) -> Any:
        found = numbers_of(a, b)
        if found is None or found[0] != ("whole", "whole"):
            return None
        return Number("whole", found[1], within.of_binary(name, within_of(a), within_of(b)))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (a, b) = Code(context, builder, sig.return_type.base), sig.args
        plain = context.get_function(getattr(operator, name), signature(types.int64, types.int64, types.int64))
        return code.made(sig.return_type, plain(builder, [code.whole(a, args[0]), code.whole(b, args[1])]))

    for key in (getattr(operator, name), getattr(operator, f"i{name.strip('_')}")):
        typed(key, result)
        lowered(key, lower)


def _register_unary(key: Any, rule: Any, of_whole: Callable[[Any, Any], Any]) -> None:
    def result(a: Any) -> Any:
        if not isinstance(a, Number):
            return None
        return Number("whole", a.base, within.UNARY[key](a.within)) if a.kind == "whole" else a

    typed(key, result)

    @lower_builtin(key, Number)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (t,) = Code(context, builder, sig.args[0].base), sig.args
        if t.kind == "whole":
            return code.made(sig.return_type, of_whole(builder, *code.wholes(sig, args)))
        return code.given(t, rule(code.of(t, args[0]), code))


def _negative_of(builder: Any, x: Any) -> Any:
    return builder.sub(ir.Constant(x.type, 0), x, flags=("nsw",) * (x.type.width == 32))


def _absolute(builder: Any, x: Any) -> Any:
    return builder.select(builder.icmp_signed("<", x, ir.Constant(x.type, 0)), _negative_of(builder, x), x)


for _name in rules.BINARY:
    _register_binary(_name)
for _name, _sign in dict(lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=").items():
    _register_comparing(_name, _sign)
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _register_of_bits(_name)
_register_unary(operator.neg, rules.neg, _negative_of)
_register_unary(operator.pos, rules.pos, lambda builder, x: x)
_register_unary(abs, rules.absolute, _absolute)


def _inverted(a: Any) -> Any:
    is_whole = isinstance(a, Number) and a.kind == "whole"
    return Number("whole", a.base, within.inverted(a.within)) if is_whole else None


typed(operator.invert, _inverted)


@lower_builtin(operator.invert, Number)
def _invert(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    code = Code(context, builder, sig.return_type.base)
    return code.made(sig.return_type, builder.not_(code.whole(sig.args[0], args[0])))


def _register_truth(key: Any, sign: str) -> None:
    typed(key, lambda a: types.boolean if isinstance(a, Number) else None)

    @lower_builtin(key, Number)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (t,) = Code(context, builder, sig.args[0].base), sig.args
        if t.kind == "whole":
            x = code.whole(t, args[0], narrow=t.narrow)
            return builder.icmp_signed(sign, x, ir.Constant(x.type, 0))
        compare = builder.fcmp_unordered if sign == "!=" else builder.fcmp_ordered
        return compare(sign, code.of(t, args[0]).x.value, code.zero.value)


_register_truth(bool, "!=")
_register_truth(operator.truth, "!=")
_register_truth(operator.not_, "==")


def _cast(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    code = Code(context, builder, toty.base)
    if toty.kind == "whole":
        return code.made(toty, code.whole(fromty, value))
    return code.given(toty, code.of(fromty, value))


for _plain in (Number, types.Integer, types.Float, types.Boolean):
    lower_cast(_plain, Number)(_cast)
