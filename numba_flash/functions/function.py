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
import linecache
import math
import os
import re
import sys
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from . import rules

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
        tree = _read(function, option, ())
        found = _known.get(tree)
        if found is None:
            if len(_known) >= 1000:
                _known.clear()
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
        made = _build(self.tree, stand_ins, helper)
        return _with_row_first(made, helper) if self.asks_row else made

    def takes(self, count: int) -> str | None:
        """Why it cannot be called with `count` arguments, not counting ROW, or None."""
        try:
            inspect.signature(self.build({})).bind(*range(count + self.asks_row))
        except TypeError as error:
            return str(error)
        return None


_known: dict[Tree, Function] = {}


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
        used = sorted({attribute for owner, attribute in _attributes_of(callers[-1]) if owner == name})
        if used and all(hasattr(value, attribute) for attribute in used):
            return ("namespace", *((x, _read(getattr(value, x), f"{name}.{x}", callers)) for x in used))
    try:
        if value in _BUILTINS:
            return ("builtin", _BUILTINS[value])
        if value in _MATH:
            if _MATH[value] not in rules.FUNCTIONS:
                raise TypeError(_not_in_math(_MATH[value], callers[-1]))
            return ("math", _MATH[value])
    except TypeError:
        if isinstance(value, Hashable):
            raise
    raise TypeError(_cannot_capture(value, name, callers[-1]))


def _cannot_capture(value: Any, name: str, code: types.CodeType) -> str:
    where = _place(code, _line_of(code, name.partition(".")[0]))
    if isinstance(value, types.ModuleType):
        return f"{where} uses the module {name}: a kernel knows math, and what is a function or a number in others"
    if hasattr(value, "shape"):
        return f"{where} captures the array {name}: pass it in aux=, and take it as an argument"
    what = f"{name}, a {type(value).__name__}" if not callable(value) else f"{name}()"
    return f"{where} uses {what}, which a kernel does not know: {WHAT_TO_WRITE}"


def _not_in_math(name: str, code: types.CodeType) -> str:
    known = ", ".join((*rules.FUNCTIONS, *rules.CONSTANTS))
    return f"{_place(code, _line_of(code, name))} uses math.{name}; of math a kernel knows {known}"


def _read_function(function: types.FunctionType, callers: tuple[Any, ...]) -> Tree:
    code = function.__code__
    if code in callers:
        raise TypeError(f"{_place(code, code.co_firstlineno)}: a function that calls itself is none for a kernel")
    wrong = _wrong_in(code)
    if wrong:
        raise TypeError(wrong)
    within = (*callers, code)
    names, known, builtin = _globals_of(code), function.__globals__, vars(builtins)
    captured = []
    for name in names:
        if name in known or name in builtin:
            captured.append((name, _read(known[name] if name in known else builtin[name], name, within)))
        else:
            raise TypeError(f"{_place(code, _line_of(code, name))} uses {name}, which is not defined")
    cells: tuple[Tree, ...] = ()
    if function.__closure__:
        cells = tuple(
            _read(cell.cell_contents, name, within)
            for name, cell in zip(code.co_freevars, function.__closure__, strict=True)
        )
    owners = [name for name, tree in (*captured, *zip(code.co_freevars, cells, strict=True)) if tree == ("module",)]
    for owner, attribute in _attributes_of(code):
        if owner in owners and attribute not in (*rules.FUNCTIONS, *rules.CONSTANTS):
            raise TypeError(_not_in_math(attribute, code))
    defaults = tuple(_read(x, "a default", within) for x in function.__defaults__ or ())
    named = tuple((name, _read(x, name, within)) for name, x in sorted((function.__kwdefaults__ or {}).items()))
    return ("function", code, tuple(captured), cells, defaults, named)


def _line_of(code: types.CodeType, name: str) -> int:
    """The line on which a function reads `name`."""
    return next((line for x, line in _instructions(code) if x.argval == name), code.co_firstlineno)


def _instructions(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    """Each instruction with its line."""
    lines = {start: line for start, _, line in code.co_lines() if line}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        yield instruction, line


@functools.lru_cache(maxsize=1000)
def _globals_of(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function reads, and those that its inner functions read."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_globals_of(constant))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=1000)
def _attributes_of(code: types.CodeType) -> tuple[tuple[str, str], ...]:
    """(captured name, its attribute), once for each time that a function reads one."""
    instructions = list(dis.get_instructions(code))
    inside = [pair for x in code.co_consts if isinstance(x, types.CodeType) for pair in _attributes_of(x)]
    return (
        *(
            (one.argval, two.argval)
            for one, two in itertools.pairwise(instructions)
            if one.opname in ("LOAD_GLOBAL", "LOAD_DEREF") and two.opname in ("LOAD_ATTR", "LOAD_METHOD")
        ),
        *inside,
    )


def _code_of(tree: Tree) -> types.CodeType:
    return _code_of(tree[1]) if tree[0] == "partial" else tree[1]


def _text(tree: Any) -> str:
    """Everything that decides what is computed, and nothing of where it was written."""
    if isinstance(tree, types.CodeType):
        facts = "argcount posonlyargcount kwonlyargcount flags names varnames freevars cellvars consts".split()
        handlers = getattr(tree, "co_exceptiontable", b"")
        return _text(("code", tree.co_code.hex(), handlers.hex(), *(getattr(tree, f"co_{fact}") for fact in facts)))
    if isinstance(tree, tuple):
        return f"({','.join(map(_text, tree))})"
    return f"{type(tree).__name__} {sorted(tree, key=repr) if isinstance(tree, frozenset) else tree!r}"


OF_TUPLES = "tuple"  # its stand-in converts the tree of a tuple


def _as_it_is(x: Any) -> Any:
    return x


def _build(tree: Tree, stand_ins: Mapping[Any, Any], helper: Callable[[Any], Any]) -> Any:
    kind = tree[0]
    if kind == "function":
        return _build_function(tree, stand_ins, helper)
    if kind == "partial":
        _, function, arguments, named = tree
        built = helper(_build(function, stand_ins, helper))
        values = [_build(x, stand_ins, helper) for x in arguments]
        return _with_arguments(built, values, {key: _build(x, stand_ins, helper) for key, x in named})
    if kind == "tuple":
        return tuple(_build(x, stand_ins, helper) for x in stand_ins.get(OF_TUPLES, _as_it_is)(tree)[1:])
    if kind == "float":
        return float.fromhex(tree[1])
    if kind == "module":
        return _math_of(stand_ins)
    if kind == "namespace":
        made = types.ModuleType("namespace")
        for name, x in tree[1:]:
            value = _build(x, stand_ins, helper)
            setattr(made, name, helper(value) if x[0] in ("function", "partial") else value)
        return made
    if kind == "builtin":
        return stand_ins.get(tree[1], getattr(builtins, tree[1]))
    if kind == "math":
        return getattr(_math_of(stand_ins), tree[1])
    return None if kind == "none" else tree[1]


def _build_function(tree: Tree, stand_ins: Mapping[Any, Any], helper: Callable[[Any], Any]) -> Any:
    _, code, captured, cells, defaults, named = tree
    names: dict[str, Any] = {"__builtins__": builtins, "__name__": "numba_flash.functions"}
    made_cells = tuple(types.CellType() for _ in cells)
    function = types.FunctionType(code, names, code.co_name, None, made_cells)

    def of(x: Tree) -> Any:
        made = _build(x, stand_ins, helper)
        return helper(made) if x[0] in ("function", "partial") else made

    function.__defaults__ = tuple(map(of, defaults)) or None
    function.__kwdefaults__ = {name: of(x) for name, x in named} or None
    names.update((name, of(x)) for name, x in captured)
    for cell, x in zip(made_cells, cells, strict=True):
        cell.cell_contents = of(x)
    return function


def _with_arguments(function: Any, values: list[Any], named: dict[str, Any]) -> Any:
    """functools.partial as a function with a cell for each of its arguments: kernels have no partial."""
    signature = inspect.signature(getattr(function, "py_func", function))
    parameters = signature.bind_partial(*values, **named).arguments
    names = list(signature.parameters)
    free = [name for name in names if name not in parameters]
    call = ", ".join(name if name in free else f"given_{name}" for name in names)
    source = (
        f"lambda given, {', '.join(f'given_{name}' for name in parameters)}: lambda {', '.join(free)}: given({call})"
    )
    return eval(source, {"__builtins__": {}})(function, *parameters.values())


ROW = "q_index"  # a parameter of this name, wherever it stands, is the row of q


def _row_at(tree: Tree) -> int | None:
    """The index of ROW among the parameters; None without."""
    try:
        names = list(inspect.signature(_build(tree, {}, _as_it_is)).parameters)
    except TypeError:  # of a partial, which `takes` reports
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


def _math_of(stand_ins: Mapping[Any, Any]) -> Any:
    return stand_ins.get("math", math)


MARK = "numba_flash: "  # marks the part of a compiler's error that a user should read


def explain_failure(error: Exception, functions: Sequence[Function]) -> Exception | None:
    """What a compiler found wrong with a user's function, in a few words with the line; None if the error is not the
    user's."""
    place = getattr(error, "loc", None)
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)) + (f" at {place.filename} ({place.line})" if place else "")
    marked = re.search(f"{MARK}(.*)", text)
    for function in functions:
        codes = list(_codes_in(function.tree))
        for path, line in re.findall(r'(?: at |File ")([^"\n]*?)(?:", line | \()(\d+)', text):
            for code in codes:
                lines = [number for *_, number in code.co_lines() if number]
                if os.path.basename(path) == os.path.basename(code.co_filename) and int(line) in lines:
                    why = marked[1] if marked else _first_words(text)
                    return TypeError(f"{_place(code, int(line))}: {why}. {WHAT_TO_WRITE[0].upper()}{WHAT_TO_WRITE[1:]}")
    where = " or ".join(function.where for function in functions)
    return TypeError(f"{where}: {marked[1]}") if marked else None


def _codes_in(tree: Any) -> Iterator[types.CodeType]:
    if isinstance(tree, types.CodeType):
        yield tree
        yield from _codes_in(tree.co_consts)
    elif isinstance(tree, tuple):
        for part in tree:
            yield from _codes_in(part)


def _first_words(text: str) -> str:
    """Numba's first complaint, without the types of this package."""
    if "NRT required" in text:
        return "it makes a list or an array, which a kernel does not know"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Failed in")]
    words = re.sub(r"whole\(float\d\d\)", "int", lines[0] if lines else "it cannot be compiled")
    words = re.sub(r"(real|dual)\(float\d\d\)", "float", words)
    return re.sub(r"table\(.*?\)", "an aux array", words)[:200].rstrip(".: ")


# What kernels cannot do, by the Python instruction that does it.
_REFUSED = {
    "RAISE_VARARGS": "it raises, and a kernel cannot",
    "LOAD_ASSERTION_ERROR": "it asserts, and a kernel cannot",
    "LOAD_COMMON_CONSTANT": "it asserts, and a kernel cannot",
    "PUSH_EXC_INFO": "it catches exceptions, and a kernel raises none",
    "SETUP_FINALLY": "it catches exceptions, and a kernel raises none",
    "SETUP_WITH": "it uses with, which a kernel does not know",
    "GEN_START": "it is a generator or a coroutine; it is to return a number",
    "BEFORE_WITH": "it uses with, which a kernel does not know",
    "IMPORT_NAME": "it imports; do so outside of it",
    "STORE_SUBSCR": "it writes to an array; it is to return what it computes",
    "STORE_ATTR": "it sets an attribute; it is to return what it computes",
    "STORE_GLOBAL": "it sets a global; it is to return what it computes",
    "BUILD_MAP": "it makes a dict, which a kernel does not know",
    "BUILD_SET": "it makes a set, which a kernel does not know",
    "FORMAT_VALUE": "it makes a string, which a kernel does not know",
    "FORMAT_SIMPLE": "it makes a string, which a kernel does not know",
    "RETURN_GENERATOR": "it is a generator or a coroutine; it is to return a number",
}


@functools.lru_cache(maxsize=1000)
def _wrong_in(code: types.CodeType) -> str | None:
    """What this function does that a kernel cannot, with the line, or None."""
    before, text = None, None
    for instruction, line in _instructions(code):
        why = _REFUSED.get(instruction.opname)
        loads = instruction.opname in ("LOAD_CONST", "RETURN_CONST")
        if loads and isinstance(instruction.argval, str | bytes):
            text = text or f"{_place(code, line)}: {instruction.argval!r} is text, which a kernel does not know"
        returns = before if instruction.opname == "RETURN_VALUE" else instruction
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST") and returns is not None:
            if returns.opname in ("LOAD_CONST", "RETURN_CONST") and returns.argval is None:
                why = "it returns None here, or comes to its end without return; every way through it returns a number"
        if why:
            return f"{_place(code, line)}: {why}"
        before = instruction
    return text


def _place(code: types.CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_name} ({code.co_filename}, line {line}" + (f": {text})" if text else ")")
