"""The rules of dual numbers, each written once: values and derivatives are computed together.

A Pair is a value x and its derivative d by the incoming score. d is None if it is known to be 0, and then nothing is
computed for it. So adding to a score costs nothing, and its derivative stays 1.

x and d are anything with Python's operators: NumPy's numbers (numbers.py), or values of the code that is being compiled
(compiled/code.py). `f` has their functions: f.exp(x) and those of math, f.where(condition, x, y), f.zero, f.one.

Where a function has no derivative, the one that torch takes counts: 0 for abs at 0, and for min and max that of the
number that Python returns.

A derivative of 0 stays 0 behind an infinite slope, and an infinite one becomes 0 behind a slope of 0, where 0 * inf
would be NaN. So sqrt(max(s, 0.0)) below 0 gives nothing, and neither does tanh(exp(s)) where exp overflows.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple


class Pair(NamedTuple):
    x: Any
    d: Any = None


def _plus(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else one + other


def _minus(one: Any, other: Any) -> Any:
    return one if other is None else -other if one is None else one - other


def _times(d: Any, factor: Any) -> Any:
    return None if d is None else d * factor


def _scaled(d: Any, slope: Any, f: Any) -> Any:
    """d times a slope that may be infinite."""
    return None if d is None else f.each(d, lambda x: f.where(x == 0, f.zero, x * slope))


def _finite(d: Any, f: Any) -> Any:
    """d for a product with a slope that may be 0: an infinity becomes the largest number, NaN stays."""
    return f.each(d, lambda x: f.where(x > f.largest, f.largest, f.where(x < -f.largest, -f.largest, x)))


def add(a: Pair, b: Pair, f: Any) -> Pair:
    return Pair(a.x + b.x, _plus(a.d, b.d))


def sub(a: Pair, b: Pair, f: Any) -> Pair:
    return Pair(a.x - b.x, _minus(a.d, b.d))


def mul(a: Pair, b: Pair, f: Any) -> Pair:
    return Pair(a.x * b.x, _plus(_times(a.d, b.x), _times(b.d, a.x)))


def truediv(a: Pair, b: Pair, f: Any) -> Pair:
    y = a.x / b.x
    if b.d is None:
        return Pair(y, None if a.d is None else a.d / b.x)
    is_far = f.fabs(b.x) == math.inf  # for instance in 1 / (1 + exp(-s)): y is 0 all around
    return Pair(y, f.each(_minus(a.d, _scaled(b.d, y, f)), lambda d: f.where((d == 0) | is_far, f.zero, d / b.x)))


def floordiv(a: Pair, b: Pair, f: Any) -> Pair:
    return Pair(f.floor(a.x / b.x))


def mod(a: Pair, b: Pair, f: Any) -> Pair:
    """The result has the sign of b, as in Python."""
    rest = f.fmod(a.x, b.x)
    x = f.where((rest != 0) & ((rest < 0) ^ (b.x < 0)), rest + b.x, rest)
    return Pair(x, _minus(a.d, _times(b.d, f.floor(a.x / b.x))))


def power(a: Pair, b: Pair, f: Any) -> Pair:
    y = f.pow(a.x, b.x)
    by_base = None
    if a.d is not None:  # x ** 0 is 1 for every x
        slope = f.where(b.x == 0, f.zero, b.x * f.pow(a.x, b.x - 1))
        by_base = _scaled(_finite(a.d, f), slope, f)
    if b.d is None:
        return Pair(y, by_base)
    # 0 ** b stays 0 for every b, and torch takes it so at b = 0 too.
    is_flat = (y == 0) | ((a.x == 0) & (b.x == 0))
    return Pair(y, _plus(by_base, f.where(is_flat, f.zero, _scaled(b.d, y * f.log(a.x), f))))


def whole_power(a: Pair, exponent: int, f: Any) -> Pair:
    """a ** exponent for an exponent that is known at compile time."""
    if exponent == 0:
        return Pair(f.one)
    below = _repeated(a.x, abs(exponent) - 1)  # None: 1
    x = a.x if below is None else below * a.x
    if exponent > 0:
        return Pair(x, a.d if a.d is None or below is None else a.d * (below * exponent))
    y = f.one / x
    return Pair(y, None if a.d is None else _scaled(_finite(a.d, f), y / a.x * exponent, f))


def _repeated(x: Any, count: int) -> Any:
    """x ** count by squaring; None for 1."""
    if count == 0:
        return None
    half = _repeated(x, count // 2)
    square = x if half is None else half * half
    return square if half is None or count % 2 == 0 else square * x


def neg(a: Pair, f: Any) -> Pair:
    return Pair(-a.x, None if a.d is None else -a.d)


def pos(a: Pair, f: Any) -> Pair:
    return a


def absolute(a: Pair, f: Any) -> Pair:
    return Pair(f.fabs(a.x), None if a.d is None else f.where(a.x == 0, f.zero, f.where(a.x < 0, -a.d, a.d)))


def choose(condition: Any, a: Pair, b: Pair, f: Any) -> Pair:
    """a if the condition holds, otherwise b."""
    x = f.where(condition, a.x, b.x)
    if a.d is None and b.d is None:
        return Pair(x)
    return Pair(x, f.where(condition, f.zero if a.d is None else a.d, f.zero if b.d is None else b.d))


def minimum(a: Pair, b: Pair, f: Any) -> Pair:
    return choose(b.x < a.x, b, a, f)


def maximum(a: Pair, b: Pair, f: Any) -> Pair:
    return choose(b.x > a.x, b, a, f)


BINARY = dict(add=add, sub=sub, mul=mul, truediv=truediv, floordiv=floordiv, mod=mod, pow=power)
UNARY = dict(neg=neg, pos=pos, abs=absolute)

TWO_OVER_ROOT_PI = 2 / math.sqrt(math.pi)
# {function of math with one argument: its derivative, from x, from y = the function of x, and from f}
SLOPES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "exp": lambda x, y, f: y,
    "expm1": lambda x, y, f: y + 1,
    "log": lambda x, y, f: 1 / x,
    "log1p": lambda x, y, f: 1 / (x + 1),
    "log2": lambda x, y, f: 1 / (x * math.log(2)),
    "log10": lambda x, y, f: 1 / (x * math.log(10)),
    "sqrt": lambda x, y, f: 0.5 / y,
    "sin": lambda x, y, f: f.cos(x),
    "cos": lambda x, y, f: -f.sin(x),
    "tan": lambda x, y, f: y * y + 1,
    "asin": lambda x, y, f: 1 / f.sqrt(1 - x * x),
    "acos": lambda x, y, f: -1 / f.sqrt(1 - x * x),
    "atan": lambda x, y, f: 1 / (x * x + 1),
    "sinh": lambda x, y, f: f.cosh(x),
    "cosh": lambda x, y, f: f.sinh(x),
    "tanh": lambda x, y, f: 1 - y * y,
    "asinh": lambda x, y, f: 1 / f.sqrt(x * x + 1),
    "acosh": lambda x, y, f: 1 / f.sqrt(x * x - 1),
    "atanh": lambda x, y, f: 1 / (1 - x * x),
    "erf": lambda x, y, f: TWO_OVER_ROOT_PI * f.exp(-x * x),
    "erfc": lambda x, y, f: -TWO_OVER_ROOT_PI * f.exp(-x * x),
    "degrees": lambda x, y, f: 180 / math.pi,
    "radians": lambda x, y, f: math.pi / 180,
}


# At an infinite number SATURATING functions have slope 0. STEEP functions have an infinite slope somewhere.
SATURATING = ("exp", "expm1", "tanh", "atan", "erf", "erfc")
STEEP = (
    "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "tan", "asin", "acos", "sinh", "cosh", "acosh", "atanh",
)  # fmt: skip


def apply(name: str, a: Pair, f: Any) -> Pair:
    """Applies a function of SLOPES."""
    y, d = getattr(f, name)(a.x), a.d
    if d is None:
        return Pair(y)
    slope = SLOPES[name](a.x, y, f)
    d = _finite(d, f) if name in SATURATING else d
    return Pair(y, _scaled(d, slope, f) if name in STEEP else d * slope)


def fabs(a: Pair, f: Any) -> Pair:
    return absolute(a, f)


def atan2(a: Pair, b: Pair, f: Any) -> Pair:
    square = a.x * a.x + b.x * b.x
    d = _minus(_times(a.d, b.x), _times(b.d, a.x))
    is_far = square == math.inf  # there the angle stays as it is; at (0, 0) it has no derivative
    d = None if d is None else f.each(d, lambda x: f.where((x == 0) | is_far, f.zero, x / square))
    return Pair(f.atan2(a.x, b.x), d)


def hypot(a: Pair, b: Pair, f: Any) -> Pair:
    y = f.hypot(a.x, b.x)
    d = _plus(_times(a.d, a.x), _times(b.d, b.x))
    return Pair(y, None if d is None else f.where(y == 0, f.zero, d / y))


def copysign(a: Pair, b: Pair, f: Any) -> Pair:
    x = f.copysign(a.x, b.x)
    if a.d is None:
        return Pair(x)
    return Pair(x, f.where(a.x == 0, f.zero, f.where((x < 0) ^ (a.x < 0), -a.d, a.d)))


def fmod(a: Pair, b: Pair, f: Any) -> Pair:
    return Pair(f.fmod(a.x, b.x), _minus(a.d, _times(b.d, f.trunc(a.x / b.x))))


MATH_BINARY = dict(pow=power, atan2=atan2, hypot=hypot, copysign=copysign, fmod=fmod)
TO_WHOLE = ("floor", "ceil", "trunc", "rint")  # their results are integers
ASKING = ("isnan", "isinf", "isfinite")
CONSTANTS = ("pi", "e", "tau", "inf", "nan")
FUNCTIONS = (*SLOPES, "fabs", *MATH_BINARY, *TO_WHOLE[:3], *ASKING)
