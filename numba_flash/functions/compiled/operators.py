"""Python's operators for Numbers, also with a plain number as one operand. Importing it registers them with Numba."""

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, errors, types
from numba.core.extending import lower_builtin, lower_cast
from numba.core.typing import signature
from numba.core.typing.templates import AbstractTemplate, infer, infer_global

from .. import rules
from ..checks import NO_INVERSE
from ..failures import MARK, NOT_ITERABLE
from . import within
from .code import Code
from .number_types import Number, Table, Truth, constant_of, is_truth, kind_of, result_of, within_of

SIGNS = dict(lt="<", le="<=", gt=">", ge=">=", eq="==", ne="!=")


def typed(key: Any, result: Callable[..., Any]) -> None:
    """Registers result(*types), which gives Numba the type of key(...), or None for types that others handle."""

    class Template(AbstractTemplate):
        prefer_literal = True

        def generic(self, args: Any, kws: Any) -> Any:
            t = None if kws else result(*args)
            return None if t is None else signature(t, *args)

    Template.key = key  # type: ignore[attr-defined]
    (infer if isinstance(key, str) else infer_global(key))(Template)


def numbers_of(*args: Any) -> tuple[tuple[str, ...], Any] | None:
    """The kinds and the computing type, if all are numbers and at least one is a Number."""
    kinds = tuple(map(kind_of, args))
    bases = [t.base for t in args if isinstance(t, Number)]
    if any(isinstance(t, Table) for t in args):
        raise errors.TypingError(f"{MARK}{NOT_ITERABLE}")
    return (kinds, bases[0]) if bases and None not in kinds else None  # type: ignore[return-value]


def _register_binary(name: str) -> None:
    rule, plain = rules.BINARY[name], getattr(operator, name)

    def result(a: Any, b: Any) -> Any:
        found = numbers_of(a, b)
        if found is None:
            return None
        kinds, base = found
        # A power whose exponent may be negative is real, as in Python. Only a constant is known not to be negative.
        exponent = constant_of(b) if name == "pow" else 0
        if kinds == ("whole", "whole") and name != "truediv" and exponent is not None and exponent >= 0:
            return Number("whole", base, within.of_binary(name, within_of(a), within_of(b)))
        return Number("real", base) if name == "floordiv" else result_of(kinds, base)

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code, (a, b) = Code(context, builder, sig.return_type.base), sig.args
        if sig.return_type.kind == "whole":
            difference = code.difference(sig, args) if name == "sub" else None
            if difference is not None:
                return code.made(sig.return_type, difference)
            if name == "pow":
                return code.made(sig.return_type, _whole_power(builder, code.whole(a, args[0]), constant_of(b)))
            one, two = code.wholes(sig, args)
            if name in ("floordiv", "mod"):
                return code.made(sig.return_type, _divided(builder, one, two, within_of(b), name))
            flags = ("nsw",) * sig.return_type.narrow
            return code.made(sig.return_type, getattr(builder, name)(one, two, flags=flags))
        exponent = constant_of(b) if name == "pow" else None
        if exponent is not None:
            return code.given(sig.return_type, rules.whole_power(code.of(a, args[0]), exponent, code))
        return code.given(sig.return_type, rule(code.of(a, args[0]), code.of(b, args[1]), code))

    for key in (plain, getattr(operator, f"i{name}")):
        typed(key, result)
        lowered(key, lower)


def lowered(key: Any, lower: Any) -> None:
    """Registers `lower` for two arguments of which at least one is a Number."""
    for pattern in ((Number, Number), (Number, types.Any), (types.Any, Number)):
        lower_builtin(key, *pattern)(lower)


def _whole_power(builder: Any, x: Any, exponent: Any) -> Any:
    found = ir.Constant(x.type, 1)
    while exponent:
        found = builder.mul(found, x) if exponent % 2 else found
        x, exponent = builder.mul(x, x), exponent // 2
    return found


def _divided(builder: Any, x: Any, y: Any, within_y: Any, name: str) -> Any:
    """x // y or x % y as Python has them, which round down; 0 where y is 0. LLVM's division rounds towards 0."""
    zero, one, every_bit = (ir.Constant(x.type, value) for value in (0, 1, -1))
    by = y
    if within_y[0] <= 0:  # LLVM leaves the least number // -1 undefined; x // -1 is -x
        special = builder.or_(builder.icmp_signed("==", y, zero), builder.icmp_signed("==", y, every_bit))
        by = builder.select(special, one, y)
    quotient, rest = builder.sdiv(x, by), builder.srem(x, by)
    down = builder.and_(builder.icmp_signed("!=", rest, zero), builder.icmp_signed("<", builder.xor(rest, by), zero))
    if name == "mod":
        return builder.select(down, builder.add(rest, by), rest)
    found = builder.select(down, builder.sub(quotient, one), quotient)
    if within_y[0] > 0:
        return found
    found = builder.select(builder.icmp_signed("==", y, every_bit), builder.sub(zero, x), found)
    return builder.select(builder.icmp_signed("==", y, zero), zero, found)


def _compared(code: Code, name: str, sig: Any, args: Any) -> Any:
    sign, kinds = SIGNS[name], tuple(map(kind_of, sig.args))
    difference = code.difference(sig, args)
    if difference is not None:
        return code.builder.icmp_signed(sign, difference, ir.Constant(difference.type, 0))
    if kinds == ("whole", "whole"):
        return code.builder.icmp_signed(sign, *code.wholes(sig, args))
    compare = code.builder.fcmp_unordered if sign == "!=" else code.builder.fcmp_ordered
    one, two = (code.of(t, value).x.value for t, value in zip(sig.args, args, strict=True))
    return compare(sign, one, two)


def _register_comparing(name: str) -> None:
    key = getattr(operator, name)

    def result(a: Any, b: Any) -> Any:
        found = numbers_of(a, b)
        return found and Truth(found[1])

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code = Code(context, builder, sig.return_type.base)
        return code.made(sig.return_type, _compared(code, name, sig, args))

    typed(key, result)
    lowered(key, lower)


def _register_of_bits(name: str) -> None:
    is_shift = "shift" in name

    def result(a: Any, b: Any) -> Any:
        found = numbers_of(a, b)
        if found is None or found[0] != ("whole", "whole"):
            return None
        if is_truth(a) and is_truth(b) and not is_shift:
            return Truth(found[1])
        return Number("whole", found[1], within.of_binary(name, within_of(a), within_of(b)))

    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        code = Code(context, builder, sig.return_type.base)
        if isinstance(sig.return_type, Truth):
            operands = [code.truth(t, value) for t, value in zip(sig.args, args, strict=True)]
        else:
            operands = [code.whole(t, value) for t, value in zip(sig.args, args, strict=True)]
        found = _shifted(builder, name, *operands) if is_shift else getattr(builder, name)(*operands)
        return code.made(sig.return_type, found)

    for key in (getattr(operator, name), getattr(operator, f"i{name.strip('_')}")):
        typed(key, result)
        lowered(key, lower)


def _shifted(builder: Any, name: str, x: Any, count: Any) -> Any:
    """A shift by 64 or more, or by a negative number, shifts every bit out. LLVM leaves these undefined."""
    fits = builder.icmp_unsigned("<", count, ir.Constant(count.type, 64))
    if name == "lshift":
        zero = ir.Constant(x.type, 0)
        return builder.select(fits, builder.shl(x, builder.select(fits, count, zero)), zero)
    return builder.ashr(x, builder.select(fits, count, ir.Constant(count.type, 63)))


def _register_unary(key: Any, rule: Any, of_whole: Callable[[Any, Any], Any]) -> None:
    def result(a: Any) -> Any:
        if not isinstance(a, Number):
            return None
        if key is operator.invert and isinstance(a, Truth):
            raise errors.TypingError(f"{MARK}{NO_INVERSE}")
        if key is operator.invert and a.kind != "whole":
            return None
        return Number("whole", a.base, within.of_unary(key, a.within)) if a.kind == "whole" else a

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
for _name in SIGNS:
    _register_comparing(_name)
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    _register_of_bits(_name)
_register_unary(operator.neg, rules.neg, _negative_of)
_register_unary(operator.pos, rules.pos, lambda builder, x: x)
_register_unary(abs, rules.absolute, _absolute)
_register_unary(operator.invert, None, lambda builder, x: builder.not_(x))


def _register_truth(key: Any) -> None:
    """Registers a test for "not 0": `if`, for which Numba requires its own boolean type, or `not`."""
    of = Truth if key is operator.not_ else lambda base: types.boolean
    typed(key, lambda a: of(a.base) if isinstance(a, Number) else None)

    @lower_builtin(key, Number)
    def lower(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        found = Code(context, builder, sig.args[0].base).truth(sig.args[0], args[0])
        return builder.not_(found) if key is operator.not_ else found


for _key in (bool, operator.truth, operator.not_):
    _register_truth(_key)


def members_of(t: Any) -> list[Any]:
    """The types of a tuple's members."""
    return list(t)


def _held(held: Any, x: Any) -> Any:
    """`x in (1, 2)`; tuples of other numbers than these are Numba's."""
    if not isinstance(held, types.BaseTuple) or not isinstance(x, Number):
        return None
    return Truth(x.base) if None not in [kind_of(t) for t in members_of(held)] else None


def _holds(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    held, x = sig.args
    code, found = Code(context, builder, x.base), ir.Constant(ir.IntType(1), 0)
    for t, part in zip(members_of(held), cgutils.unpack_tuple(builder, args[0]), strict=True):
        found = builder.or_(found, _compared(code, "eq", signature(types.boolean, t, x), [part, args[1]]))
    return found


typed(operator.contains, _held)
for _tuple in (types.Tuple, types.UniTuple):
    lower_builtin(operator.contains, _tuple, Number)(_holds)


def _cast(context: Any, builder: Any, fromty: Any, toty: Any, value: Any) -> Any:
    code = Code(context, builder, toty.base)
    if isinstance(toty, Truth):
        return code.made(toty, code.truth(fromty, value))
    if toty.kind == "whole":
        return code.made(toty, code.whole(fromty, value))
    return code.given(toty, code.of(fromty, value))


for _plain in (Number, types.Integer, types.Float, types.Boolean):
    lower_cast(_plain, Number)(_cast)
