"""The numbers of a user's function that runs as Python, in the oracle and in the simulator.

A Real is a NumPy number of the computing type, with its derivative by the score or None. A Whole is an integer. They
follow the rules of the compiled function (rules.py, compiled/code.py): real numbers stay in the computing type,
whatever Python or NumPy numbers they meet; integer / integer is real; division by 0 gives an infinity or NaN and does
not raise.
"""

import functools
import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from . import rules
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
        self.base, self.x = base, int(x)

    def __bool__(self) -> bool:
        return self.x != 0

    def __index__(self) -> int:
        return self.x

    def __repr__(self) -> str:
        return f"{self.x}"


class Position(Whole):
    """q_pos itself, which as an index is not to count from the end: a negative one is before the array."""

    __slots__ = ()


class Table:
    """An aux array as the function reads it: a full set of indices gives an element, fewer give a part of the array."""

    __slots__ = ("array", "base")

    def __init__(self, base: Any, array: np.ndarray):
        self.base, self.array = base, array

    def __getitem__(self, index: Any) -> Any:
        whole = tuple(map(_index, index)) if isinstance(index, tuple) else _index(index)
        found = self.array[whole]
        if np.ndim(found):
            return Table(self.base, found)
        if self.array.dtype == bool:
            return bool(found)
        return Whole(self.base, found) if self.array.dtype.kind in "iu" else Real(self.base, found)

    @property
    def shape(self) -> tuple[Whole, ...]:
        return tuple(Whole(self.base, n) for n in self.array.shape)

    def __repr__(self) -> str:
        return f"{self.array.dtype} array of shape {self.array.shape}"


class Owed:
    """In the place of a derivative, the derivatives by each element that was read: {(index of the array, place):
    number}."""

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
    """((index of the array, place), derivative) for each entry in the place of a derivative; a plain number there is a
    0."""
    return d.parts.items() if isinstance(d, Owed) else ()


class RecordedTable(Table):
    """A Table that records what is read. places: the places of its elements in the whole array."""

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
    if isinstance(x, bool | np.bool_):
        return int(x)
    if isinstance(x, Position) and x.x < 0:
        raise IndexError(f"q_pos, here {x}, is before the array: it is a position among the keys, and no row of q")
    try:
        return operator.index(x)
    except TypeError:
        raise TypeError(f"an array is read at whole numbers, not {x!r}; int() makes one") from None


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
        if _whole(one) and _whole(two) and name != "truediv" and not (name == "pow" and int(_plain(two)) < 0):
            if name in ("floordiv", "mod") and not _plain(two):
                return Whole(base, 0)  # a kernel does not raise
            return Whole(base, plain(_plain(one), _plain(two)))
        if name == "pow" and isinstance(two, int):
            return Real(base, *rules.whole_power(_pair(base, one), two, functions_of(base)))
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
        if _whole(self) and _whole(other):
            return bool(plain(one, two))
        return bool(plain(self.base(one), self.base(two)))

    return method


def _of_bits(name: str, turned: bool = False) -> Callable[[Any, Any], Any]:
    plain = getattr(operator, name)

    def method(self: Any, other: Any) -> Any:
        if not _whole(other):
            return NotImplemented
        one, two = (_plain(other), self.x) if turned else (self.x, _plain(other))
        return Whole(self.base, plain(int(one), int(two)))

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
    """What replaces builtins and functions of math."""
    f = functions_of(base)

    def checked(name: str, x: Any) -> Any:
        if not isinstance(x, (Real, Whole, *NUMBERS)):
            raise TypeError(f"{name} takes a number, not {x!r}")
        return x

    def unary(name: str) -> Callable[[Any], Any]:
        return lambda x: Real(base, *rules.apply(name, _pair(base, checked(name, x)), f))

    def binary(name: str) -> Callable[[Any, Any], Any]:
        rule = rules.MATH_BINARY[name]
        return lambda x, y: Real(base, *rule(_pair(base, checked(name, x)), _pair(base, checked(name, y)), f))

    def to_whole(name: str) -> Callable[[Any], Any]:
        def function(x: Any) -> Any:
            if _whole(checked(name, x)):
                return Whole(base, _plain(x))
            value = getattr(f, name)(base(_plain(x)))
            return Whole(base, int(value) if np.isfinite(value) else 0)

        return function

    def asking(name: str) -> Callable[[Any], bool]:
        return lambda x: bool(getattr(f, name)(base(_plain(checked(name, x)))))

    def extreme(rule: Any, plain: Any) -> Callable[..., Any]:
        def function(*values: Any) -> Any:
            if len(values) < 2:
                raise TypeError(f"{plain.__name__} takes two numbers or more")
            if all(map(_whole, values)):
                return Whole(base, plain(map(_plain, values)))
            found = _pair(base, checked(plain.__name__, values[0]))
            for value in values[1:]:
                found = rule(found, _pair(base, checked(plain.__name__, value)), f)
            return Real(base, *found)

        return function

    def real(x: Any = 0) -> Real:
        return Real(base, *_pair(base, checked("float", x)))

    of_math: dict[str, Any] = {name: unary(name) for name in rules.SLOPES}
    of_math |= {name: binary(name) for name in rules.MATH_BINARY}
    of_math |= {name: to_whole(name) for name in rules.TO_WHOLE[:3]}
    of_math |= {name: asking(name) for name in rules.ASKING}
    of_math |= {name: getattr(math, name) for name in rules.CONSTANTS}
    of_math["fabs"] = lambda x: Real(base, *rules.fabs(_pair(base, checked("fabs", x)), f))
    return {
        "math": SimpleNamespace(**of_math),
        "float": real,
        "int": to_whole("trunc"),
        "round": to_whole("rint"),
        "bool": lambda x: bool(_plain(checked("bool", x)) != 0),
        "len": lambda table: table.shape[0],
        "min": extreme(rules.minimum, min),
        "max": extreme(rules.maximum, max),
    }


@functools.lru_cache(maxsize=200)
def as_python(function: Function, base: Any) -> Callable[..., Any]:
    """The function, for arguments Real, Whole and Table."""
    return function.build(stand_ins(base))


def score_of(function: Function, base: Any, s: Any, positions: Any, tables: Any, derivative: bool) -> Pair:
    """score_mod of one score: (the next score, its derivative by s, or None if that is 0). positions: b, h, q_pos,
    k_pos and the row of q."""
    score = Real(base, s, 1 if derivative else None)
    found = _called(function, base, (score,), positions, tables)
    if isinstance(found, bool | np.bool_) or not isinstance(found, (Real, Whole, *NUMBERS)):
        raise TypeError(must_return("score_mod", "a number", function, found))
    return _pair(base, found)


def mask_of(function: Function, base: Any, positions: Any, tables: Any) -> bool:
    """mask_mod of one position."""
    found = _called(function, base, (), positions, tables)
    if not isinstance(found, bool | np.bool_):
        raise TypeError(must_return("mask_mod", "True or False", function, found))
    return bool(found)


def must_return(option: str, what: str, function: Function, found: Any) -> str:
    kind = {Real: "float", Whole: "int"}.get(type(found), type(found).__name__)
    return f"{option} must return {what}, but {function.where} returned {found!r}, a {kind}"


def _called(function: Function, base: Any, score: tuple[Any, ...], positions: Any, tables: Any) -> Any:
    b, h, _, k_pos, q_index = (Whole(base, x) for x in positions)
    row = (q_index,) if function.asks_row else ()
    try:
        return as_python(function, base)(*row, *score, b, h, Position(base, positions[2]), k_pos, *tables)
    except Exception as error:
        line = line_in(function, error)
        at = f", at {where(positions)}" if isinstance(error, IndexError) else ""
        error.args = (f"{function.name} ({function.path}, line {line}): {error}{at}",)
        raise


def where(positions: Any) -> str:
    """In words, for messages."""
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
