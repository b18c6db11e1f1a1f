"""Rebuilds a function for one rung from its tree (function.py), with stand-ins for builtins, for math and for
numbers."""

import builtins
import dis
import inspect
import itertools
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = tuple[Any, ...]
Number = bool | int | float
# The stand-in with this name converts numbers that are written in a function or captured by it. It is given a single
# number, or all those of a tuple, and returns a function that converts each of them.
NUMBERS = "numbers"


def build(
    tree: Tree,
    stand_ins: Mapping[Any, Any],
    helper: Callable[[Any], Any],
    number: Callable[[Number], Any] | None = None,
) -> Any:
    """Builds the function or value that a tree describes. number: converts the numbers of the tuple around the tree."""

    def again(x: Tree) -> Any:
        made = build(x, stand_ins, helper, number)
        return helper(made) if x[0] in ("function", "partial") else made

    kind = tree[0]
    if kind == "function":
        return _function(tree, stand_ins, again)
    if kind == "partial":
        _, function, arguments, named = tree
        return _with_arguments(again(function), list(map(again, arguments)), {key: again(x) for key, x in named})
    if kind in ("bool", "int", "float"):
        return (number or _of_numbers(stand_ins, [_number(tree)]))(_number(tree))
    if kind == "tuple":
        number = number or _of_numbers(stand_ins, list(_numbers_in(tree)))
        return tuple(map(again, tree[1:]))
    if kind == "module":
        return _math_of(stand_ins)
    if kind == "namespace":
        made = types.ModuleType("namespace")
        for name, x in tree[1:]:
            setattr(made, name, again(x))
        return made
    if kind == "builtin":
        return stand_ins.get(tree[1], getattr(builtins, tree[1]))
    return getattr(_math_of(stand_ins), tree[1]) if kind == "math" else None


def _number(tree: Tree) -> Number:
    return float.fromhex(tree[1]) if tree[0] == "float" else tree[1]


def _numbers_in(tree: Tree) -> Iterator[Number]:
    if tree[0] in ("bool", "int", "float"):
        yield _number(tree)
    for part in tree[1:] if tree[0] == "tuple" else ():
        yield from _numbers_in(part)


def _of_numbers(stand_ins: Mapping[Any, Any], values: list[Number]) -> Callable[[Number], Any]:
    return stand_ins[NUMBERS](values) if NUMBERS in stand_ins else lambda value: value


def _math_of(stand_ins: Mapping[Any, Any]) -> Any:
    return stand_ins.get("math", math)


def _function(tree: Tree, stand_ins: Mapping[Any, Any], of: Callable[[Tree], Any]) -> Any:
    _, code, captured, cells, defaults, named = tree
    names: dict[str, Any] = {"__builtins__": builtins, "__name__": "numba_flash.functions"}
    made_cells = tuple(types.CellType() for _ in cells)
    given = dict(named)
    own = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    # Kernels pass all arguments by position: keyword-only parameters come behind the others.
    code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    function = types.FunctionType(_rewritten(code, stand_ins), names, code.co_name, None, made_cells)
    function.__defaults__ = tuple(map(of, (*defaults, *(given[name] for name in own if name in given)))) or None
    names.update((_RENAMED.get(name, name), of(x)) for name, x in captured)
    for cell, x in zip(made_cells, cells, strict=True):
        cell.cell_contents = of(x)
    return function


def _rewritten(code: types.CodeType, stand_ins: Mapping[Any, Any]) -> types.CodeType:
    """The code with its constants, and those of inner functions, converted by NUMBERS."""

    def of(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _rewritten(constant, stand_ins)
        leaves = list(_leaves(constant))
        return _rebuilt(constant, _of_numbers(stand_ins, leaves)) if leaves else constant

    code = _simpler(code)
    names = tuple(_RENAMED.get(name, name) for name in code.co_names)
    return code.replace(co_consts=tuple(map(of, code.co_consts)), co_names=names)


_RENAMED = dict(len="len_", range="range_")  # Numba wants its own behind these names


def _leaves(constant: Any) -> Iterator[Number]:
    if type(constant) in (int, float):
        yield constant
    for part in constant if type(constant) is tuple else ():
        yield from _leaves(part)


def _rebuilt(constant: Any, number: Callable[[Number], Any]) -> Any:
    if type(constant) is tuple:
        return tuple(_rebuilt(part, number) for part in constant)
    return number(constant) if type(constant) in (int, float) else constant


def _simpler(code: types.CodeType) -> types.CodeType:
    """The same code with instructions that Numba compiles correctly for our numbers and variables."""
    text, constants, every = bytearray(code.co_code), list(code.co_consts), list(dis.get_instructions(code))

    def put(at: int, name: str, argument: int) -> None:
        text[at], text[at + 1] = dis.opmap[name], argument

    for now, after in itertools.zip_longest(every, every[1:]):
        if now.opname == "LOAD_SMALL_INT" and len(constants) < 256:  # new in Python 3.14
            put(now.offset, "LOAD_CONST", len(constants))
            constants.append(now.arg)
        elif (now.opname, now.arg) in (("DUP_TOP", None), ("COPY", 1)) and after.opname.startswith("STORE_FAST"):
            # `(x := s * 2) + x` and `x = y = s * 2`: Numba loses the number that is copied. It is read from x instead.
            both = after.arg or 0
            first, second = both >> 4, both & 15
            if after.opname == "STORE_FAST":
                put(now.offset, "STORE_FAST", both)
                put(after.offset, "LOAD_FAST", both)
            elif after.opname == "STORE_FAST_LOAD_FAST":
                put(now.offset, "STORE_FAST", first)
                put(after.offset, "LOAD_FAST_LOAD_FAST", both)
            else:
                put(now.offset, "STORE_FAST_LOAD_FAST", first << 4 | first)
                put(after.offset, "STORE_FAST", second)
    return code.replace(co_code=bytes(text), co_consts=tuple(constants))


def _with_arguments(function: Any, values: list[Any], named: dict[str, Any]) -> Any:
    """functools.partial as a function with a cell for each of its arguments: kernels have no partial."""
    signature = inspect.signature(getattr(function, "py_func", function))
    parameters = signature.bind_partial(*values, **named).arguments
    starred = [name for name, x in signature.parameters.items() if x.kind is inspect.Parameter.VAR_POSITIONAL]
    given = {name: value for name, value in parameters.items() if name not in starred}
    given |= {f"more_{number}": value for name in starred for number, value in enumerate(parameters.get(name, ()))}
    free = [f"*{name}" if name in starred else name for name in signature.parameters if name not in given]
    names = [name for name in signature.parameters if name not in starred]
    names += [name for name in given if name not in names]
    call = ", ".join([f"given_{name}" if name in given else name for name in names] + [f"*{x}" for x in starred])
    source = f"lambda given, {', '.join(f'given_{name}' for name in given)}: lambda {', '.join(free)}: given({call})"
    made = eval(source, {"__builtins__": {}})(function, *given.values())
    defaults = [signature.parameters[name].default for name in signature.parameters if name in free]
    made.__defaults__ = tuple(x for x in defaults if x is not inspect.Parameter.empty) or None
    return made
