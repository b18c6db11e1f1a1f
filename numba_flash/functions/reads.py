"""Reads outside an array that are known before a kernel runs: from the shapes alone.

The function is called once with stand-ins for its numbers. A position has a known range, of which both ends occur, and
so has a number computed from one with known whole numbers. Every read up to the first decision happens for every
score, so an end outside the array is an error. A decision ends the call: the rest depends on values.
"""

import math
import operator
from types import SimpleNamespace
from typing import Any

from . import rules
from .function import Function
from .numbers import line_in

MOST_STEPS = 1000
Span = tuple[int, int]  # the least and the largest number, both included


class _Decided(Exception):
    """Raised where the code that follows depends on values."""


class Unknown:
    def __init__(self) -> None:
        self.steps = [0]

    def _other(self, *_: Any, **__: Any) -> "Unknown":
        self.steps[0] += 1
        if self.steps[0] > MOST_STEPS:
            raise _Decided
        return self if type(self) is Unknown else self.unknown  # type: ignore[attr-defined]

    def _decided(self) -> Any:
        raise _Decided

    __bool__ = __index__ = __int__ = __float__ = __len__ = __iter__ = _decided
    __hash__ = None  # type: ignore[assignment]


for _name in ("add sub mul truediv floordiv mod pow and or xor lshift rshift").split():
    setattr(Unknown, f"__{_name}__", Unknown._other)
    setattr(Unknown, f"__r{_name}__", Unknown._other)
for _name in ("neg pos abs invert lt le gt ge eq ne").split():
    setattr(Unknown, f"__{_name}__", Unknown._other)


class Known(Unknown):
    """A whole number in a known range, of which both ends occur. name: the position's name, if it is one itself."""

    def __init__(self, unknown: Unknown, span: Span, name: str = ""):
        self.unknown, self.steps = unknown, unknown.steps
        self.span, self.name = span, name

    def _by(self, operation: Any, other: Any, turned: bool = False) -> Any:
        if type(other) is not int:
            return self._other()
        ends = [operation(other, x) if turned else operation(x, other) for x in self.span]
        return Known(self.unknown, (min(ends), max(ends)))

    def __neg__(self) -> "Known":
        return Known(self.unknown, (-self.span[1], -self.span[0]))


for _name in ("add", "sub", "mul"):
    _operation = getattr(operator, _name)
    setattr(Known, f"__{_name}__", lambda a, b, by=_operation: a._by(by, b))
    setattr(Known, f"__r{_name}__", lambda a, b, by=_operation: a._by(by, b, turned=True))


class Array:
    def __init__(self, unknown: Unknown, name: str, shape: tuple[int, ...], axis: int = 0):
        self.unknown, self.name, self.shape, self.axis = unknown, name, shape, axis

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > len(self.shape):
            raise _Decided  # an error of its own
        for axis, (x, size) in enumerate(zip(indices, self.shape, strict=False)):
            self._check(x, size, self.axis + axis)
        left = self.shape[len(indices) :]
        return Array(self.unknown, self.name, left, self.axis + len(indices)) if left else self.unknown._other()

    def _check(self, index: Any, size: int, axis: int) -> None:
        span = (int(index), int(index)) if isinstance(index, int) else getattr(index, "span", (0, -1))
        before = 0 if getattr(index, "name", "") == "q_pos" else -size  # other negative numbers count from the end
        if not size or span[0] < before or span[1] >= size:
            known = f"{getattr(index, 'name', '') or 'index'} from {span[0]} to {span[1]} reads"
            what = "a read is" if span[0] > span[1] else known
            hint = " (q_pos is a position among the keys, q_index the row of q)" * (before == 0)
            raise IndexError(f"{what} outside axis {axis} of {self.name}, of size {size}{hint}")


def check(option: str, function: Function, spans: dict[str, Span | None], arrays: dict[str, tuple[int, ...]]) -> None:
    """Raises IndexError for a read outside an array that happens for any values.

    spans: of b, h, q_pos, k_pos and q_index; None: not known. arrays: the shape of each, by its name in messages.
    """
    unknown = Unknown()
    positions = {name: unknown if span is None else Known(unknown, span, name) for name, span in spans.items()}
    row = positions.pop("q_index")
    given = [*([row] if function.asks_row else []), *([unknown] if option == "score_mod" else [])]
    try:
        function.build(_stand_ins(unknown))(*given, *positions.values(), *(Array(unknown, *x) for x in arrays.items()))
    except IndexError as error:
        line = line_in(function, error)
        raise IndexError(f"{option}: {function.name} ({function.path}, line {line}): {error}") from None
    except Exception:  # noqa: S110 - compiling or calling it reports any other error
        pass


class _Noted:
    """An array, or a part of it, that notes its reads: (its number, whether b and h alone determine the element)."""

    def __init__(self, unknown: Unknown, notes: list[tuple[int, bool]], number: int, ndim: int, alone: bool = True):
        self.unknown, self.notes, self.number, self.ndim, self.alone = unknown, notes, number, ndim, alone

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        alone = self.alone and all(isinstance(x, (int, Known)) for x in indices)
        left = self.ndim - len(indices)
        if left > 0:
            return _Noted(self.unknown, self.notes, self.number, left, alone)
        self.notes.append((self.number, alone))
        return self.unknown._other()


def reads_by_head(function: Function, ndims: tuple[int, ...], wanted: tuple[int, ...]) -> list[bool] | None:
    """For each number that a score_mod reads from the arrays `wanted`: whether all scores of a head read the same one.
    None if values decide what it reads. ndims: of all arrays."""
    unknown, notes = Unknown(), list[tuple[int, bool]]()
    of_head = [Known(unknown, (0, 0)) for _ in "bh"]
    tables = [_Noted(unknown, notes, number, ndim) for number, ndim in enumerate(ndims)]
    try:
        function.build(_stand_ins(unknown))(
            *[unknown] * function.asks_row, unknown, *of_head, unknown, unknown, *tables
        )
    except Exception:
        return None
    return [alone for number, alone in notes if number in wanted]


def _stand_ins(unknown: Unknown) -> dict[str, Any]:
    other = unknown._other
    of_math = dict.fromkeys(rules.FUNCTIONS, other) | {name: getattr(math, name) for name in rules.CONSTANTS}
    whole = lambda x: x if isinstance(x, Known) else other()  # noqa: E731
    made = dict.fromkeys(("float", "round", "bool", "min", "max"), other)
    return made | dict(math=SimpleNamespace(**of_math), int=whole, len=lambda table: table.shape[0])
