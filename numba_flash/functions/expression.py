"""A user's function as one expression, found by calling it with symbols in the place of numbers.

Where the function asks whether a symbol is true, it is called once with each answer, so the expression has a choice
there. An operation that symbols do not have raises: then `expression_of` returns None, and the function has no
expression.
"""

import functools
import linecache
import operator
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from .function import Function

MOST = 64  # calls of a function; one that asks more often has a loop over symbols, or is too long for a kernel to ask


class Node(NamedTuple):
    """A part of an expression, which stands for a number. of: its operands, Nodes and Python's integers.

    "b", "h", "row", "query", "key": an argument. ("read", array, *indices): an element. ("length", array, axis).
    ("choose", condition, one, other). Anything else: an operation, of OPERATIONS.
    """

    name: str
    of: tuple[Any, ...] = ()


OPERATIONS = ("add", "sub", "mul", "floordiv", "mod", "min", "max", "lt", "le", "eq", "ne")


class _Unknown(Exception):
    """The function does something that symbols do not."""


class _Symbol:
    """Stands for a number. decide(node) -> bool."""

    __slots__ = ("decide", "node")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, node: Node, decide: Callable[[Node], bool]):
        self.node, self.decide = node, decide

    def __bool__(self) -> bool:
        return self.decide(self.node)

    def __pos__(self) -> "_Symbol":
        return self

    def __neg__(self) -> Any:
        return _operation("mul", self, -1)

    def __abs__(self) -> Any:
        return _operation("max", self, -self)


def _operation(name: str, *given: Any) -> Any:
    decide = next(x.decide for x in given if isinstance(x, _Symbol))
    if not all(isinstance(x, _Symbol | int) for x in given):
        raise _Unknown
    of = tuple(x.node if isinstance(x, _Symbol) else int(x) for x in given)
    if name in ("gt", "ge"):
        name, of = dict(gt="lt", ge="le")[name], of[::-1]
    if name in ("and", "or"):
        if not all(map(_is_truth, of)):
            raise _Unknown
        name = "min" if name == "and" else "max"
    return _Symbol(Node(name, of), decide)


def _is_truth(x: Any) -> bool:
    """Whether it is 0 or 1, as comparisons are."""
    if not isinstance(x, Node):
        return x in (0, 1)
    return x.name in ("lt", "le", "eq", "ne") or (x.name in ("min", "max") and all(map(_is_truth, x.of)))


for _name in (*OPERATIONS, "gt", "ge", "and", "or"):
    setattr(_Symbol, f"__{_name}__", lambda x, y, name=_name: _operation(name, x, y))
    setattr(_Symbol, f"__r{_name}__", lambda x, y, name=_name: _operation(name, y, x))


class _Table:
    """An array that the function reads. at: the indices so far."""

    def __init__(self, number: int, ndim: int, decide: Any, at: tuple[Any, ...] = ()):
        self.number, self.ndim, self.decide, self.at = number, ndim, decide, at

    def __getitem__(self, index: Any) -> Any:
        at = (*self.at, *(index if isinstance(index, tuple) else (index,)))
        if len(at) < self.ndim:
            return _Table(self.number, self.ndim, self.decide, at)
        if len(at) > self.ndim or not all(isinstance(x, _Symbol | int) for x in at):
            raise _Unknown
        own = tuple(x.node if isinstance(x, _Symbol) else x for x in at)
        return _Symbol(Node("read", (self.number, *own)), self.decide)

    @property
    def shape(self) -> tuple[_Symbol, ...]:
        own = range(len(self.at), self.ndim)
        return tuple(_Symbol(Node("length", (self.number, axis)), self.decide) for axis in own)

    def __iter__(self) -> Any:
        raise _Unknown


def _extreme(name: str, plain: Any) -> Callable[..., Any]:
    def one(x: Any, y: Any) -> Any:
        return _operation(name, x, y) if isinstance(x, _Symbol) or isinstance(y, _Symbol) else plain(x, y)

    return lambda *values: functools.reduce(one, values)


def _whole(x: Any) -> Any:
    return x if isinstance(x, _Symbol) else int(x)


_STAND_INS = {
    "min": _extreme("min", min),
    "max": _extreme("max", max),
    "int": _whole,
    "bool": lambda x: _operation("ne", x, 0) if isinstance(x, _Symbol) else bool(x),
    "len": lambda x: x.shape[0] if isinstance(x, _Table) else len(x),
}


@functools.lru_cache(maxsize=200)
def expression_of(function: Function, ndims: tuple[int, ...]) -> Node | int | None:
    """A mask_mod's result as an expression (or one with the same truth value). ndims: of the arrays that it reads."""
    called = function.build(_STAND_INS)
    left = [MOST]

    def call(answers: list[bool]) -> tuple[Any, list[Node]]:
        """-> (the result, the conditions asked for). The first answers are `answers`, all others True."""
        asked: list[Node] = []
        left[0] -= 1
        if left[0] < 0:
            raise _Unknown

        def decide(node: Node) -> bool:
            if node not in asked:
                asked.append(node)
                answers.extend([True] * (len(asked) - len(answers)))
            return answers[asked.index(node)]

        names = ("row",) * function.asks_row + ("b", "h", "query", "key")
        tables = [_Table(number, ndim, decide) for number, ndim in enumerate(ndims)]
        found = called(*(_Symbol(Node(name), decide) for name in names), *tables)
        result = found.node if isinstance(found, _Symbol) else operator.index(found)
        return int(answers[asked.index(result)]) if result in asked else result, asked  # e.g. `near or far`

    def explore(answers: list[bool]) -> Any:
        known = len(answers)
        found, asked = call(answers)
        for at in reversed(range(known, len(asked))):
            found = Node("choose", (asked[at], found, explore([*answers[:at], False])))
        return found

    try:
        return explore([])
    except Exception:  # the function itself may raise anything; kernels then call it and report what is wrong
        return None


def length(function: Function, ndims: tuple[int, ...]) -> int:
    """How many operations and reads a mask_mod consists of; MOST if that is not known."""
    expression, ahead, parts = expression_of(function, ndims), list[Any](), set[Node]()
    ahead.append(expression)
    while ahead:
        part = ahead.pop()
        if isinstance(part, Node) and part not in parts:
            parts.add(part)
            ahead += part.of
    return MOST if expression is None else sum(bool(part.of) for part in parts)


def source_of(expression: Node | int, text_of: Callable[[Any, Callable[[Any], str]], str]) -> str:
    """The body of a function that computes each part of an expression once. text_of(part, name_of): the text of a part,
    in which name_of(part) stands for another one."""
    names: dict[Any, str] = {}
    lines: list[str] = []

    def name_of(part: Any) -> str:
        if part not in names:
            text = text_of(part, name_of)
            names[part] = f"x{len(names)}"
            lines.append(f"    {names[part]} = {text}\n")
        return names[part]

    result = name_of(expression)
    return "".join(lines) + f"    return {result}\n"


def made_of(text: str, names: dict[str, Any]) -> Any:
    """The function that a text defines, over `names`. The simulator and debuggers find the text by its file."""
    file = f"<an expression, {zlib.crc32(text.encode()):x}>"
    linecache.cache[file] = len(text), None, text.splitlines(True), file
    made: dict[str, Any] = {}
    exec(compile(text, file, "exec"), names, made)
    (function,) = made.values()
    return function
