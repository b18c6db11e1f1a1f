"""torch's operations on the stand-ins of a traced function: each writes a line of Python that computes the same."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .traced_values import OPERATIONS, Lines, Row, Value, dtype_of, readable

KINDS = ("bool", "whole", "real")  # the kind of a line's result; an operation on two kinds gives the later one
MATH = "tanh exp expm1 log log1p log2 sqrt sin cos tan sinh cosh asin acos atan erf".split()


def _named(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def keep(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return keep


def _lines_of(*given: Any) -> Lines:
    return next(x.lines for x in given if isinstance(x, Value | Row))


def _values(*given: Any) -> list[Value]:
    lines = _lines_of(*given)
    return [lines.value(x) for x in given]


def _common(*values: Value) -> str:
    return KINDS[max([KINDS.index(x.kind) for x in values])]


SPANS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def _arithmetic(sign: str, names: tuple[str, ...], real: bool = False, swapped: bool = False) -> None:
    @_named(*names)
    def compute(a: Any, b: Any, *, alpha: Any = None, rounding_mode: Any = None) -> Value:
        if alpha is not None or rounding_mode is not None:
            raise NotImplementedError("it uses alpha or rounding_mode, which are not implemented for kernels")
        a, b = _values(*((b, a) if swapped else (a, b)))
        text = f"{a.as_number} {sign} {b.as_number}"
        if real or _common(a, b) == "real":
            return a.lines.write(text, "real")
        found = a.lines.write_whole(text, a, b)
        if sign in SPANS and a.span and b.span and (a.span[0] == a.span[1] or b.span[0] == b.span[1]):
            ends = [SPANS[sign](x, y) for x in a.span for y in b.span]
            found.span = min(ends), max(ends)
        return found


for _sign, _names in {"+": ("add",), "-": ("sub", "subtract"), "*": ("mul", "multiply"), "**": ("pow",)}.items():
    _arithmetic(_sign, _names)
_arithmetic("//", ("floordiv", "floor_divide"))
_arithmetic("%", ("mod", "remainder"))
_arithmetic("/", ("truediv", "div", "true_divide", "divide"), real=True)
for _sign, _name in {"+": "radd", "-": "rsub", "*": "rmul", "**": "rpow", "//": "rfloordiv", "%": "rmod"}.items():
    _arithmetic(_sign, (_name,), swapped=True)
_arithmetic("/", ("rtruediv", "rdiv"), real=True, swapped=True)


def _comparing(sign: str, *names: str) -> None:
    @_named(*names)
    def compare(a: Any, b: Any) -> Value:
        a, b = _values(a, b)
        return a.lines.write(f"{a.as_number} {sign} {b.as_number}", "bool")


for _sign, _words in (
    ("<", "lt less"),
    ("<=", "le less_equal"),
    (">", "gt greater"),
    (">=", "ge greater_equal"),
    ("==", "eq"),
    ("!=", "ne not_equal"),
):
    _comparing(_sign, *_words.split())


def _of_bits(sign: str, word: str, name: str) -> None:
    @_named(name, f"r{name}", f"bitwise_{name}")
    def combine(a: Any, b: Any) -> Value:
        a, b = _values(a, b)
        if a.kind == b.kind == "bool":
            return a.lines.write(f"{a.text} {word} {b.text}", "bool")
        return a.lines.write(f"{a.as_number} {sign} {b.as_number}", "whole", dtype_of(a, b))

    @_named(f"logical_{name}")
    def combine_truths(a: Any, b: Any) -> Value:
        a, b = _values(a, b)
        return a.lines.write(f"{a.as_truth} {word} {b.as_truth}", "bool")


for _sign, _word, _name in (("&", "and", "and"), ("|", "or", "or"), ("^", "!=", "xor")):
    _of_bits(_sign, _word, _name)


@_named("invert", "bitwise_not")
def _invert(a: Value) -> Value:
    return _not(a) if a.kind == "bool" else a.lines.write_whole(f"~{a.text}", a)


@_named("logical_not")
def _not(a: Value) -> Value:
    return a.lines.write(f"not {a.as_truth}", "bool")


@_named("neg", "negative")
def _neg(a: Value) -> Value:
    if a.kind == "real":
        return a.lines.write(f"-{a.text}", "real")
    found = a.lines.write_whole(f"-{a.as_number}", a)
    found.span = a.span and (-a.span[1], -a.span[0])
    return found


@_named("abs", "absolute")
def _abs(a: Value) -> Value:
    text = f"abs({a.as_number})"
    return a.lines.write(text, "real") if a.kind == "real" else a.lines.write_whole(text, a)


def _of_math(name: str) -> None:
    @_named(name, *{"asin": ("arcsin",), "acos": ("arccos",), "atan": ("arctan",)}.get(name, ()))
    def compute(a: Value) -> Value:
        return a.lines.write(f"math.{name}({a.as_real})", "real")


for _name in MATH:
    _of_math(_name)


def _of_formula(formula: str, *names: str) -> None:
    @_named(*names)
    def compute(a: Value) -> Value:
        return a.lines.write(formula.format(a.as_real), "real")


_of_formula("2.0 ** {0}", "exp2")
_of_formula("1.0 / math.sqrt({0})", "rsqrt")
_of_formula("1.0 / {0}", "reciprocal")
_of_formula("1.0 / (1.0 + math.exp(-{0}))", "sigmoid")
_of_formula("{0} * {0}", "square")
_of_formula("0.0 if {0} <= 0.0 else {0}", "relu")  # relu(NaN) is NaN, and its derivative at 0 is 0
_of_formula("{0} // 1.0", "floor")  # math.floor makes a whole number, which does not hold every real one
_of_formula("-(-{0} // 1.0)", "ceil")
_of_formula("{0} // 1.0 if {0} > 0.0 else -(-{0} // 1.0)", "trunc")


def _extremes(name: str, word: str, sign: str) -> None:
    @_named(name)
    def compute(a: Any, b: Any) -> Value:
        a, b = _values(a, b)
        if _common(a, b) != "real":
            return a.lines.write(f"{word}({a.as_number}, {b.as_number})", "whole", dtype_of(a, b))
        # Equal numbers get half of the derivative each. If either is NaN, the result is NaN.
        one, two = a.as_real, b.as_real
        rest = f"{two} if {two} {sign} {one} else 0.5 * {one} + 0.5 * {two}"
        return a.lines.write(f"{one} if {one} {sign} {two} else {rest}", "real")


_extremes("maximum", "max", ">")
_extremes("minimum", "min", "<")


# From torch 2.14 on, a number equal to a bound of clamp shares the derivative with it, and a bound of Python takes all.
_BOUNDS_SHARE = torch.__version__ >= (2, 14)


@_named("clamp", "clip")
def _clamp(a: Any, min: Any = None, max: Any = None) -> Value:
    for bound, sign, word in ((min, ">", "max"), (max, "<", "min")):
        if bound is not None:
            x, y = _values(a, bound)
            if _common(x, y) != "real" or (_BOUNDS_SHARE and not isinstance(bound, int | float)):
                a = OPERATIONS[f"{word}imum"](x, y)
                continue
            # At the bound, before torch 2.14 the number gets the derivative. NaN stays, in the number and in the bound.
            keeps = sign if _BOUNDS_SHARE else f"{sign}="
            one, two = x.as_real, y.as_real
            a = x.lines.write(f"{one} if {one} {keeps} {two} or {one} != {one} else {two}", "real")
    return a


@_named("where")
def _where(condition: Any, a: Any, b: Any) -> Value:
    condition, a, b = _values(condition, a, b)
    kind = _common(a, b)
    texts = [dict(real=x.as_real, whole=x.as_number, bool=x.text)[kind] for x in (a, b)]
    text = f"{texts[0]} if {condition.as_truth} else {texts[1]}"
    return condition.lines.write(text, kind, dtype_of(a, b))


@_named("masked_fill")
def _masked_fill(a: Value, mask: Any, value: Any) -> Value:
    return _where(mask, value, a)


@_named("to", "type")
def _to(a: Value, *given: Any, dtype: Any = None, device: Any = None, **others: Any) -> Value:
    """Converts between kinds of numbers. Reals have one dtype; a conversion to another one is refused, not ignored."""
    dtype = next((x for x in given if isinstance(x, torch.dtype)), dtype)
    if dtype is None:
        return a
    if dtype is torch.bool:
        return a if a.kind == "bool" else a.lines.write(a.as_truth, "bool")
    if not dtype.is_floating_point:
        text = f"int({a.text})" if a.kind == "real" else a.as_number
        return a.lines.write_whole(text, Value(a.lines, text, "whole", readable(dtype)))
    if dtype is not a.lines.real:
        raise NotImplementedError(
            f"it asks for {dtype}, and a kernel computes this problem in {a.lines.real}: use that"
        )
    return a if a.kind == "real" else a.lines.write(a.as_real, "real")


_DTYPES = dict(float=torch.float32, double=torch.float64, int=torch.int32, long=torch.int64, bool=torch.bool)
for _name, _dtype in (_DTYPES | dict(half=torch.float16, bfloat16=torch.bfloat16)).items():
    OPERATIONS[_name] = functools.partial(_to, dtype=_dtype)


def _constant(number: float) -> Callable[..., Value]:
    def made(a: Value, *size: Any, dtype: Any = None, **others: Any) -> Value:
        value = a.lines.value(number)
        return value if dtype is None else _to(value, dtype)

    return made


OPERATIONS |= dict.fromkeys(("new_ones", "ones_like"), _constant(1))
OPERATIONS |= dict.fromkeys(("new_zeros", "zeros_like"), _constant(0))


@_named("full_like")
def _full_like(a: Value, fill_value: Any, **others: Any) -> Value:
    return _constant(fill_value)(a, **others)


@_named("new_full")
def _new_full(a: Value, size: Any, fill_value: Any, **others: Any) -> Value:
    return _constant(fill_value)(a, **others)


OPERATIONS |= dict.fromkeys(("detach", "clone", "contiguous"), lambda a: a)


@_named("getitem")
def _getitem(tensor: Tensor, index: Any) -> Any:
    lines = _lines_of(*(index if isinstance(index, tuple) else (index,)))
    return Row(lines, tensor, ())[index]
