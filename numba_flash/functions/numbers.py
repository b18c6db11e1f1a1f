"""The numbers of a user's function that runs as Python, in the oracle and in the simulator.

A Real is a NumPy number of the computing type, with its derivative by the score or None. A Whole is an integer of 64
bits. They follow the rules of the compiled function (rules.py, compiled/code.py): real numbers stay in the computing
type, whatever Python or NumPy numbers they meet; integer / integer is real, and so is a power whose exponent is no
constant; what does not fit into 64 bits is taken modulo 2^64; division by 0 does not raise.
"""

import functools
import math
import operator
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import rules
from .build import NUMBERS as OF_NUMBERS
from .checks import INT64, NO_INVERSE
from .failures import AT_CONSTANTS, NOT_ITERABLE, NOT_WHOLE, takes, too_many_numbers
from .function import Function
from .rules import Pair


class Real:
    __slots__ = ("base", "d", "x")

    def __init__(self, base: Any, x: Any, d: Any = None):
        self.base, self.x, self.d = base, base(x), d if d is None or isinstance(d, Owed) else base(d)

    def __bool__(self) -> bool:
        return bool(self.x != 0)

    def __repr__(self) -> str:
        return f"{self.x}" if self.d is None else f"{self.x} (derivative {self.d})"


class Whole:
    __slots__ = ("base", "x")

    def __init__(self, base: Any, x: int):
        x = int(x)
        self.base, self.x = base, x if INT64[0] <= x <= INT64[1] else (x + 2**63) % 2**64 - 2**63

    def __bool__(self) -> bool:
        return self.x != 0

    def __repr__(self) -> str:
        return f"{self.x}"


class Constant(Whole):
    """A whole number that is written in the function or captured by it. Only these index tuples."""

    __slots__ = ()

    def __index__(self) -> int:
        return self.x


class Truth(Whole):
    """True or False; in arithmetic it is 1 or 0."""

    __slots__ = ()

    def __invert__(self) -> Any:
        raise TypeError(NO_INVERSE)

    def __repr__(self) -> str:
        return f"{bool(self)}"


class Range:
    """The result of range(), for loops and for `in`."""

    def __init__(self, base: Any, *ends: Any):
        if not all(map(_whole, ends)):
            raise TypeError(f"range() takes {NOT_WHOLE}")
        self.base, self.numbers = base, range(*(int(_plain(x)) for x in ends))

    def __iter__(self) -> Any:
        return (Whole(self.base, number) for number in self.numbers)

    def __contains__(self, x: Any) -> bool:
        if not _whole(x):
            raise TypeError(f"range() has {NOT_WHOLE}")
        return int(_plain(x)) in self.numbers


class Position(Whole):
    """q_pos itself. As an index it never counts from the end: a negative one is outside the array."""

    __slots__ = ()


class Table:
    """An aux array as the function reads it: a full set of indices gives an element, fewer give a part of the array."""

    __slots__ = ("array", "base")

    def __init__(self, base: Any, array: np.ndarray):
        self.base, self.array = base, array

    def __getitem__(self, index: Any) -> Any:
        whole = tuple(map(_index, index)) if isinstance(index, tuple) else (_index(index),)
        if len(whole) > self.array.ndim:
            raise TypeError(too_many_numbers(self.array.ndim, len(whole)))
        found = self.array[whole]
        if np.ndim(found):
            return Table(self.base, found)
        if self.array.dtype == bool:
            return Truth(self.base, found)
        return Whole(self.base, found) if self.array.dtype.kind in "iu" else Real(self.base, found)

    @property
    def shape(self) -> tuple[Whole, ...]:
        return tuple(Whole(self.base, n) for n in self.array.shape)

    def __iter__(self) -> Any:
        raise TypeError(NOT_ITERABLE)

    def __repr__(self) -> str:
        return f"{self.array.dtype} array of shape {self.array.shape}"


class Owed:
    """Stands in place of a derivative: {(index of an array, place in it): the derivative by that element}."""

    __slots__ = ("parts",)
    __array_ufunc__ = None  # operators with NumPy's numbers call this class

    def __init__(self, parts: dict[tuple[int, int], Any]):
        self.parts = parts

    def each(self, function: Callable[[Any], Any]) -> "Owed":
        return Owed({key: function(value) for key, value in self.parts.items()})

    def __add__(self, other: Any) -> "Owed":
        parts = dict(self.parts)
        for key, value in parts_of(other):
            parts[key] = parts.get(key, 0) + value
        return Owed(parts)

    def __neg__(self) -> "Owed":
        return self.each(operator.neg)

    def __sub__(self, other: Any) -> "Owed":
        return self + -other

    def __rsub__(self, other: Any) -> "Owed":
        return -self + other

    def __mul__(self, factor: Any) -> "Owed":
        return self.each(lambda value: value * factor)

    def __truediv__(self, divisor: Any) -> "Owed":
        return self.each(lambda value: value / divisor)

    __radd__ = __add__


def parts_of(d: Any) -> Any:
    """((index of the array, place), derivative) for each entry of an Owed; none for a plain number, which is 0
    there."""
    return d.parts.items() if isinstance(d, Owed) else ()


class RecordedTable(Table):
    """A Table that records which elements are read. places: the places of its elements in the whole array."""

    __slots__ = ("number", "places")

    def __init__(self, base: Any, array: np.ndarray, number: int, places: Any = None):
        super().__init__(base, array)
        self.number = number
        self.places = np.arange(array.size).reshape(array.shape) if places is None else places

    def __getitem__(self, index: Any) -> Any:
        found, places = super().__getitem__(index), Table(self.base, self.places)[index]
        if isinstance(found, Table):
            return RecordedTable(self.base, found.array, self.number, places.array)
        return Real(self.base, found.x, Owed({(self.number, places.x): self.base(1)}))


def _index(x: Any) -> int:
    if isinstance(x, Position) and x.x < 0:
        raise IndexError(f"q_pos, here {x}, is before the array: it is a position among the keys, and no row of q")
    if not _whole(x):
        raise TypeError(f"an aux array is read at {NOT_WHOLE}")
    return int(_plain(x))


NUMBERS = (bool, int, float, np.bool_)


def _pair(base: Any, x: Any) -> Pair:
    return Pair(x.x, x.d) if isinstance(x, Real) else Pair(base(x.x if isinstance(x, Whole) else x))


def _whole(x: Any) -> bool:
    return isinstance(x, Whole | int | np.bool_)


@functools.cache
def functions_of(base: Any) -> Any:
    """`f` of rules.py."""
    inverse = {f"a{name}": f"arc{name}" for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh", "tan2")}
    names = inverse | dict(pow="power")  # NumPy's names that differ from math's
    of_math = {name: getattr(np, names.get(name, name), None) for name in (*rules.FUNCTIONS, "rint")}
    of_math |= dict(erf=lambda x: math.erf(float(x)), erfc=lambda x: math.erfc(float(x)))

    def where(condition: Any, x: Any, y: Any) -> Any:
        return x if condition else y

    def each(d: Any, function: Any) -> Any:
        return d.each(function) if isinstance(d, Owed) else function(d)

    return SimpleNamespace(**of_math, where=where, each=each, zero=base(0), one=base(1), largest=np.finfo(base).max)


def _binary(name: str, turned: bool = False) -> Callable[[Any, Any], Any]:
    rule, plain = rules.BINARY[name], getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (Real, Whole, *NUMBERS)):
            return NotImplemented
        base = self.base
        one, two = (other, self) if turned else (self, other)
        if name == "pow" and isinstance(two, Constant | int):
            exponent = int(_plain(two))
            if _whole(one) and exponent >= 0:
                return Whole(base, pow(int(_plain(one)), exponent, 2**64))
            return Real(base, *rules.whole_power(_pair(base, one), exponent, functions_of(base)))
        if _whole(one) and _whole(two) and name not in ("truediv", "pow"):
            if name in ("floordiv", "mod") and not _plain(two):
                return Whole(base, 0)  # a kernel does not raise
            return Whole(base, plain(int(_plain(one)), int(_plain(two))))
        return Real(base, *rule(_pair(base, one), _pair(base, two), functions_of(base)))

    return method


def _plain(x: Any) -> Any:
    return x.x if isinstance(x, Real | Whole) else x


def _comparing(name: str) -> Callable[[Any, Any], Any]:
    plain = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (Real, Whole, *NUMBERS)):
            return NotImplemented
        one, two = _plain(self), _plain(other)
        if not (_whole(self) and _whole(other)):
            one, two = self.base(one), self.base(two)
        return Truth(self.base, plain(one, two))

    return method


def _of_bits(name: str, turned: bool = False) -> Callable[[Any, Any], Any]:
    plain = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not _whole(other):
            return NotImplemented
        one, two = (int(_plain(other)), self.x) if turned else (self.x, int(_plain(other)))
        if "shift" in name:
            two = two if 0 <= two < 64 else 64  # a kernel does not raise
        truths = all(isinstance(x, Truth | bool) for x in (self, other)) and "shift" not in name
        return (Truth if truths else Whole)(self.base, plain(one, two))

    return method


def _unary(name: str) -> Callable[[Any], Any]:
    rule, plain = rules.UNARY[name], getattr(operator, name)

    def method(self: Any) -> Any:
        if isinstance(self, Whole):
            return Whole(self.base, plain(self.x))
        return Real(self.base, *rule(_pair(self.base, self), functions_of(self.base)))

    return method


for _kind in (Real, Whole):
    for _name in rules.BINARY:
        setattr(_kind, f"__{_name}__", _binary(_name))
        setattr(_kind, f"__r{_name}__", _binary(_name, turned=True))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_kind, f"__{_name}__", _comparing(_name))
    for _name in rules.UNARY:
        setattr(_kind, f"__{_name}__", _unary(_name))
    _kind.__hash__ = None  # type: ignore[assignment]
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(Whole, f"__{_name.strip('_')}__", _of_bits(_name))
    setattr(Whole, f"__r{_name.strip('_')}__", _of_bits(_name, turned=True))
setattr(Whole, "__invert__", lambda self: Whole(self.base, ~self.x))  # noqa: B010


@functools.cache
def stand_ins(base: Any) -> dict[Any, Any]:
    """Replacements for builtins and functions of math."""
    f = functions_of(base)

    def checked(name: str, count: int | None, values: Any) -> Any:
        numbers = all(isinstance(x, (Real, Whole, *NUMBERS)) for x in values)
        if not values or count not in (None, len(values)) or not numbers:
            raise TypeError(takes(name, count, map(_word, values)))
        return values

    def of_reals(name: str, count: int, rule: Any) -> Callable[..., Any]:
        return lambda *x: Real(base, *rule(*(_pair(base, each) for each in checked(name, count, x)), f))

    def to_whole(name: str, by: str) -> Callable[..., Any]:
        def function(*values: Any) -> Any:
            (x,) = checked(name, 1, values)
            return Whole(base, _plain(x) if _whole(x) else _saturated(getattr(f, by)(base(_plain(x)))))

        return function

    def asking(name: str) -> Callable[..., Truth]:
        return lambda *x: Truth(base, getattr(f, name)(base(_plain(checked(name, 1, x)[0]))))

    def extreme(name: str, rule: Any, plain: Any) -> Callable[..., Any]:
        def function(*values: Any) -> Any:
            if len(checked(name, None, values)) < 2:
                raise TypeError(takes(name, None, map(_word, values)))
            if all(map(_whole, values)):
                return Whole(base, plain(map(_plain, values)))
            pairs = [_pair(base, value) for value in values]
            return Real(base, *functools.reduce(lambda one, two: rule(one, two, f), pairs))

        return function

    def length(*values: Any) -> Whole:
        if len(values) != 1 or not isinstance(values[0], Table | tuple):
            raise TypeError(takes("len", 0, map(_word, values)))
        return values[0].shape[0] if isinstance(values[0], Table) else Constant(base, len(values[0]))

    of_math: dict[str, Any] = {name: of_reals(name, 1, functools.partial(rules.apply, name)) for name in rules.SLOPES}
    of_math |= {name: of_reals(name, 2, rule) for name, rule in rules.MATH_BINARY.items()}
    of_math |= {name: to_whole(name, name) for name in rules.TO_WHOLE[:3]}
    of_math |= {name: asking(name) for name in rules.ASKING}
    of_math |= {name: Real(base, getattr(math, name)) for name in rules.CONSTANTS}
    of_math["fabs"] = of_reals("fabs", 1, rules.fabs)
    return {
        "math": SimpleNamespace(**of_math),
        "float": of_reals("float", 1, lambda a, f: a),
        "int": to_whole("int", "trunc"),
        "round": to_whole("round", "rint"),
        "bool": lambda *x: Truth(base, _plain(checked("bool", 1, x)[0]) != 0),
        "len": length,
        "range": functools.partial(Range, base),
        "min": extreme("min", rules.minimum, min),
        "max": extreme("max", rules.maximum, max),
        OF_NUMBERS: lambda values: functools.partial(_captured, base),
    }


def _captured(base: Any, value: bool | int | float) -> Any:
    kind: Any = Truth if isinstance(value, bool) else Constant if isinstance(value, int) else Real
    return kind(base, value)


def _saturated(x: Any) -> int:
    """A real number without fraction as a whole one of 64 bits: the nearest; NaN becomes 0."""
    return 0 if x != x else INT64[1] if x >= 2.0**63 else INT64[0] if x < -(2.0**63) else int(x)


def _word(x: Any) -> str:
    return WORDS.get(type(x).__name__, type(x).__name__)


# The words for these classes in error messages.
WORDS = dict(
    Range="range", Real="float", Whole="int", Constant="int", Truth="bool", Table="aux array", RecordedTable="aux array"
)


@functools.lru_cache(maxsize=200)
def as_python(function: Function, base: Any) -> Callable[..., Any]:
    """The function, for arguments Real, Whole and Table."""
    return function.build(stand_ins(base))


def score_of(function: Function, base: Any, s: Any, positions: Any, tables: Any, derivative: bool) -> Pair:
    """score_mod of one score: (the next score, its derivative by s, or None if that is 0). positions: b, h, q_pos,
    k_pos and the row of q."""
    score = Real(base, s, 1 if derivative else None)
    found = _called("score_mod", function, base, (score,), positions, tables)
    if isinstance(found, bool | np.bool_ | Truth) or not isinstance(found, (Real, Whole, *NUMBERS)):
        raise TypeError(must_return("score_mod", "a number", function, found))
    return _pair(base, found)


def mask_of(function: Function, base: Any, positions: Any, tables: Any) -> bool:
    """mask_mod of one position: the truth of its result, for instance of `near or flags[i]`."""
    found = _called("mask_mod", function, base, (), positions, tables)
    if not isinstance(found, bool | np.bool_ | Whole):
        raise TypeError(must_return("mask_mod", "True or False", function, found))
    return bool(_plain(found))


def must_return(option: str, what: str, function: Function, found: Any) -> str:
    return f"{option} must return {what}, but {function.where} returned {found!r}, a {_word(found)}"


# (error of a function that runs as Python, type that is raised in its place).
KINDS = (
    *((AttributeError, TypeError), (NameError, TypeError), (TypeError, TypeError)),
    *((ArithmeticError, ValueError), (IndexError, IndexError), (ValueError, ValueError)),
    (NotImplementedError, NotImplementedError),
)


def _called(option: str, function: Function, base: Any, score: tuple[Any, ...], positions: Any, tables: Any) -> Any:
    b, h, _, k_pos, q_index = (Whole(base, x) for x in positions)
    row = (q_index,) if function.asks_row else ()
    try:
        return as_python(function, base)(*row, *score, b, h, Position(base, positions[2]), k_pos, *tables)
    except Exception as error:
        kind = next((kind for known, kind in KINDS if isinstance(error, known)), None)
        if kind is None:  # for instance a debugger's, when it quits
            raise
        words = re.sub(r"'(\w+)'", lambda found: WORDS.get(found[1], found[0]), str(error))
        words = AT_CONSTANTS if words.startswith("tuple indices must be") else words
        words = NOT_ITERABLE if "Table'" in str(error) else words
        line = line_in(function, error)
        at = f", at {where(positions)}" if kind is IndexError else ""
        raise kind(f"{option}: {function.name} ({function.path}, line {line}): {words}{at}") from error


def where(positions: Any) -> str:
    """The positions in words, for messages."""
    b, h, q_pos, k_pos, q_index = (int(x) for x in positions)
    return f"b {b}, h {h}, q_pos {q_pos} (row {q_index} of q), k_pos {k_pos}"


def line_in(function: Function, error: Exception) -> int:
    """The last line of the function's own file in the error's traceback."""
    trace, line = error.__traceback__, function.line
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == function.path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
