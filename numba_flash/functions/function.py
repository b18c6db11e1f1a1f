"""Function: a plain Python function as a value, equal to another if both compute the same.

A function is read once into a tree of tuples: its bytecode, its constants, and what it captures by closure, globals,
defaults and functools.partial, down through the functions that it calls. The tree is compared and hashed, it names the
code in the disk cache, and the function is rebuilt from it. So a later change of a global does not affect what was read
before, and the next call reads another Function.
"""

import builtins
import dis
import functools
import hashlib
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Any, final

import numpy as np

from . import remembered, rules
from .build import build
from .checks import inner_codes, instructions, place, wrong_in, wrong_with

Tree = tuple[Any, ...]

BUILTINS = ("abs", "bool", "float", "int", "len", "max", "min", "range", "round")
_BUILTINS = {getattr(builtins, name): name for name in BUILTINS}
_MATH = {value: name for name, value in vars(math).items() if isinstance(value, types.BuiltinFunctionType)}
WHAT_TO_WRITE = (
    "it may use arithmetic, comparisons, if, loops, min, max, abs, round, int, float, math.*, aux[...], captured "
    "numbers, and functions made of these"
)


@final
class Function:
    """`Function.of` creates it: one object for all functions that compute the same."""

    __slots__ = ("_hash", "_key", "line", "name", "path", "row_at", "tree")

    def __init__(self, tree: Tree, name: str, path: str, line: int):
        self.tree, self.name, self.path, self.line = tree, name, path, line
        self._hash, self._key = hash(tree), ""
        self.row_at = _row_at(tree)

    @staticmethod
    def of(option: str, function: Any) -> "Function":
        """Reads what was given as the argument `option`; a function that was read before stays as it was then."""
        if type(function) is Function:
            return function
        try:
            tree = _read(function, option, ())
        except Refused as error:
            raise TypeError(f"{option}: {error}") from None
        found = _known.get(tree)
        if found is None:
            if len(_known) >= remembered.MOST:
                _known.clear()
                remembered.forget()
            code = _code_of(tree)
            found = _known[tree] = Function(tree, code.co_name, code.co_filename, code.co_firstlineno)
        return found

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Function) and self.tree == other.tree)

    @property
    def key(self) -> str:
        """Identifies what it computes, equally in every process and wherever its file is."""
        if not self._key:
            text = f"{sys.version_info[:2]} {_text(self.tree)}"
            self._key = hashlib.sha256(text.encode()).hexdigest()
        return self._key

    def __repr__(self) -> str:
        return f"Function({self.name!r}, {self.key})"

    def __reduce__(self) -> Any:
        raise TypeError(f"{self} is of one process")

    @property
    def asks_row(self) -> bool:
        return self.row_at is not None

    @property
    def where(self) -> str:
        """The place of the function, for messages."""
        return f"{self.name} ({self.path}, line {self.line})"

    def build(self, stand_ins: Mapping[Any, Any], helper: Callable[[Any], Any] = lambda function: function) -> Any:
        """The function, rebuilt. stand_ins: what replaces a builtin ("abs") or a function of math ("math", "exp").
        helper: applied to each function that it calls. If it asks for ROW, that is the first argument."""
        made = build(self.tree, stand_ins, helper)
        return _with_row_first(made, helper) if self.asks_row else made

    def takes(self, count: int) -> str | None:
        """Why it cannot be called with `count` arguments, not counting ROW, or None."""
        try:
            inspect.signature(_as_written(self.tree)).bind(*range(count + self.asks_row))
        except TypeError as error:
            return str(error)
        return None


_known: dict[Tree, Function] = {}


class Refused(Exception):
    """Why a kernel cannot take a function, without the name of the argument."""


def _as_written(tree: Tree) -> Any:
    """An object with the function's own signature, for inspect."""
    if tree[0] == "partial":
        return functools.partial(_as_written(tree[1]), *tree[2], **dict(tree[3]))
    _, code, _, cells, defaults, named = tree
    made = types.FunctionType(code, {}, code.co_name, defaults or None, tuple(types.CellType() for _ in cells))
    made.__kwdefaults__ = dict(named) or None
    return made


ROW = "q_index"  # a parameter of this name, wherever it stands, is the row of q


def _row_at(tree: Tree) -> int | None:
    """The index of ROW among the parameters; None without."""
    try:
        names = list(inspect.signature(_as_written(tree)).parameters)
    except TypeError:  # a partial's arguments do not fit; `takes` reports it
        return None
    return names.index(ROW) if ROW in names else None


def _with_row_first(function: Any, helper: Callable[[Any], Any]) -> Any:
    """The function with ROW as its first parameter, and the others in their order."""
    parameters = inspect.signature(function).parameters.values()
    if any(x.kind == x.KEYWORD_ONLY for x in parameters):
        raise TypeError(f"{ROW} and the others are not to be keyword-only: write {ROW} behind k_pos, before *aux")
    stars = {x.name: "*" * (x.kind == x.VAR_POSITIONAL) for x in parameters}
    given = ", ".join(star + name for name, star in stars.items())
    others = ", ".join(star + name for name, star in stars.items() if name != ROW)
    made = eval(f"lambda function: lambda {ROW}, {others}: function({given})", {"__builtins__": {}})(helper(function))
    made.__defaults__ = tuple(x.default for x in parameters if x.default is not x.empty and x.name != ROW) or None
    return made


def _read(value: Any, name: str, callers: tuple[Any, ...]) -> Tree:
    """The tree of a value that is called `name`; callers: the code of the functions that are being read."""
    value = getattr(value, "py_func", value)  # the function under @njit
    kind = type(value)
    if kind is types.FunctionType:
        return _read_function(value, callers)
    if kind is functools.partial:
        inner = _read(value.func, name, callers)
        within = (*callers, _code_of(inner))
        arguments = tuple(_read(x, f"an argument of {name}", within) for x in value.args)
        named = tuple((key, _read(x, f"{key} of {name}", within)) for key, x in sorted(value.keywords.items()))
        return ("partial", inner, arguments, named)
    if not callers:
        raise TypeError(
            f"{name} must be a plain Python function or None, not {value!r}; of a method or of an object that can be "
            "called, pass a function"
        )
    if kind is bool or isinstance(value, np.bool_):
        return ("bool", bool(value))
    if kind is int or isinstance(value, np.integer):
        wrong = wrong_with(int(value))
        if wrong:
            raise Refused(f"{_where(callers[-1], name)}: {name} = {wrong}")
        return ("int", int(value))
    if kind is float or isinstance(value, np.floating):
        return ("float", float(value).hex())
    if value is None:
        return ("none",)
    if kind is tuple:
        return ("tuple", *(_read(x, name, callers) for x in value))
    if value is math:
        return ("module",)
    if kind is types.ModuleType:
        used = sorted({attribute for owner, attribute in attributes_of(callers[-1]) if owner == name})
        if used and all(hasattr(value, attribute) for attribute in used):
            return ("namespace", *((x, _read(getattr(value, x), f"{name}.{x}", callers)) for x in used))
    try:
        if value in _BUILTINS:
            return ("builtin", _BUILTINS[value])
        if value in _MATH:
            if _MATH[value] not in rules.FUNCTIONS:
                raise Refused(_not_in_math(_MATH[value], callers[-1]))
            return ("math", _MATH[value])
    except TypeError:
        if isinstance(value, Hashable):
            raise
    raise Refused(_cannot_capture(value, name, callers[-1]))


# Replacements for functions that a kernel does not know, by the functions' names.
_INSTEAD = dict(
    divmod="// and %", sum="+ in a loop", pow="**", power="**", any="or", all="and", absolute="abs(x)",
    minimum="min(x, y)", maximum="max(x, y)", where="x if condition else y", sign="math.copysign(1, x)",
    float32="float(x)", float64="float(x)", int32="int(x)", int64="int(x)", clip="min(max(x, low), high)",
)  # fmt: skip


def _cannot_capture(value: Any, name: str, code: types.CodeType) -> str:
    where = _where(code, name)
    if isinstance(value, types.ModuleType):
        return f"{where} uses the module {name}: a kernel knows math, and what is a function or a number in others"
    if hasattr(value, "shape") and not isinstance(value, type):
        return f"{where} captures the array {name}: pass it in aux=, and take it as an argument"
    last = name.rpartition(".")[2]
    instead = _INSTEAD.get(last) or (f"math.{last}(x)" if last in rules.FUNCTIONS else "")
    if callable(value) and instead:
        return f"{where} uses {name}(), which a kernel does not know: write {instead}"
    what = f"{name}, a {type(value).__name__}" if not callable(value) else f"{name}()"
    return f"{where} uses {what}, which a kernel does not know: {WHAT_TO_WRITE}"


def _not_in_math(name: str, code: types.CodeType) -> str:
    known = ", ".join((*rules.FUNCTIONS, *rules.CONSTANTS))
    return f"{_where(code, name)} uses math.{name}; of math a kernel knows {known}"


def _where(code: types.CodeType, name: str) -> str:
    """The place where a function reads `name`."""
    first = name.partition(".")[0]
    return place(code, next((line for x, line in instructions(code) if x.argval == first), code.co_firstlineno))


def _read_function(function: types.FunctionType, callers: tuple[Any, ...]) -> Tree:
    code = function.__code__
    if code in callers:
        raise Refused(f"{place(code, code.co_firstlineno)}: a function that calls itself is none for a kernel")
    wrong = wrong_in(code) or _wrong_defaults(function)
    if wrong:
        raise Refused(wrong)
    within = (*callers, code)
    names, known, builtin = globals_of(code), function.__globals__, vars(builtins)
    captured = []
    for name in names:
        if name in known or name in builtin:
            captured.append((name, _read(known[name] if name in known else builtin[name], name, within)))
        else:
            raise Refused(f"{_where(code, name)} uses {name}, which is not defined")
    cells: tuple[Tree, ...] = ()
    if function.__closure__:
        cells = tuple(
            _read(cell.cell_contents, name, within)
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
        )
    owners = [name for name, tree in (*captured, *zip(code.co_freevars, cells, strict=True)) if tree == ("module",)]
    for owner, attribute in attributes_of(code):
        if owner in owners and attribute not in (*rules.FUNCTIONS, *rules.CONSTANTS):
            raise Refused(_not_in_math(attribute, code))
    defaults = tuple(_read(x, "a default", within) for x in function.__defaults__ or ())
    named = tuple((name, _read(x, name, within)) for name, x in sorted((function.__kwdefaults__ or {}).items()))
    return ("function", code, tuple(captured), cells, defaults, named)


def _wrong_defaults(function: types.FunctionType) -> str | None:
    """Why its defaults are refused, or None: keyword-only parameters come last (build.py), as must all defaults."""
    code, named = function.__code__, function.__kwdefaults__ or {}
    own = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    missing = [name for name in own if name not in named]
    if missing and (function.__defaults__ or missing != list(own[: len(missing)])):
        where = place(code, code.co_firstlineno)
        return f"{where}: its parameter {missing[-1]} comes behind one with a default: give it a default, too"
    return None


@functools.lru_cache(maxsize=1000)
def globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and those that its inner functions read."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for inner in inner_codes(code):
        found.update(globals_of(inner))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=1000)
def attributes_of(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """(captured name, its attribute), once for each time that a function reads one."""
    inside = [pair for x in inner_codes(code) for pair in attributes_of(x)]
    return (
        *(
            (one.argval, two.argval)
            for one, two in itertools.pairwise(dis.get_instructions(code))
            if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF") and two.opname in ("LOAD_ATTR", "LOAD_METHOD")
        ),
        *inside,
    )


def _code_of(tree: Tree) -> types.CodeType:
    return _code_of(tree[1]) if tree[0] == "partial" else tree[1]


def _text(tree: Any) -> str:
    """A text of everything that decides the result, and nothing about where the function was written."""
    if isinstance(tree, types.CodeType):
        facts = "argcount posonlyargcount kwonlyargcount flags names varnames freevars cellvars consts".split()
        handlers = getattr(tree, "co_exceptiontable", b"")
        return _text(("code", tree.co_code.hex(), handlers.hex(), *(getattr(tree, f"co_{fact}") for fact in facts)))
    if isinstance(tree, tuple):
        return f"({','.join(map(_text, tree))})"
    return f"{type(tree).__name__} {sorted(tree, key=repr) if isinstance(tree, frozenset) else tree!r}"
