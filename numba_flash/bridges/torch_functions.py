"""score_mod and mask_mod in a graph of torch: the operation takes a string for each, its key.

A key identifies what a function computes, with its captured numbers as they were when it was traced. Before each run of
a graph torch.compile checks that everything its code read is unchanged. So it traces `_captured`, which reads the
numbers that a function captures. The table of functions only grows, by one for each function in a graph.
"""

import functools
import math
import sys
import types
from typing import Any

import numpy as np
import torch

from ..dispatch.block_mask import BlockMask
from ..functions.function import Function, attributes_of, globals_of
from ..problem.options import FUNCTIONS
from .static_call import numbered

IN_GRAPHS = torch.__version__ >= (2, 13)  # older versions were not tried with `_captured`
_functions: dict[str, Function] = {}


def key_of(option: str, function: Any) -> str:
    """The key of a function, which `function_of` then knows."""
    found = Function.of(option, function)
    _functions[found.key] = found
    return found.key


def function_of(key: str | None) -> Function | None:
    if key is None:
        return None
    if key not in _functions:
        raise NotImplementedError(
            "a saved graph has a score_mod or mask_mod, which only the process that traced it knows: save the model "
            "and trace it here, or use bias= and mask="
        )
    return _functions[key]


def keys_of(functions: Any) -> tuple[str | None, ...]:
    """The keys of a StaticCall's functions. Traced ones are keys already."""
    named = zip(FUNCTIONS, functions, strict=True)
    return tuple([x if x is None or isinstance(x, str) else key_of(name, of_block_mask(x)) for name, x in named])


def of_block_mask(x: Any) -> Any:
    """The function of a BlockMask; the tile states that it keeps are not part of a graph."""
    return x.function if isinstance(x, BlockMask) else x


def traced_keys(given: tuple[Any, ...]) -> tuple[tuple[str | None, ...], tuple[Any, ...]]:
    """The keys of a call's functions, and aux, in the code that torch.compile traces."""
    *functions, aux = given
    if not isinstance(aux, tuple):
        raise TypeError(f"aux must be a tuple of arrays, not {type(aux).__name__}")
    keys: list[str | None] = []
    for option, function in zip(FUNCTIONS, functions, strict=True):
        if function is None:
            keys.append(None)
        elif isinstance(function, BlockMask):
            keys.append(_key(option, function.function, None))
        elif isinstance(function, functools.partial):
            numbers = [_number(x) for x in function.args], [_number(x) for x in function.keywords.values()]
            parts = tuple(numbers[0]), tuple(function.keywords), tuple(numbers[1])
            keys.append(_key(option, function.func, _captured(function), *parts))
        else:
            keys.append(_key(option, function, _captured(function)))
    return tuple(keys), aux


def _key(option: str, function: Any, captured: Any, given: Any = (), names: Any = (), named: Any = ()) -> str:
    """Key of a function, or of functools.partial(function, ...). torch.compile guards the arguments: it makes them
    constants, and compares them before each run."""
    if given or names:
        function = functools.partial(function, *given, **dict(zip(names, named, strict=True)))
    return key_of(option, function)


def numbered_by_keys(keys: tuple[str | None, ...], label: str) -> str | None:
    return numbered(tuple([function_of(key) for key in keys]), label)


def _number(x: Any) -> Any:
    """The value in this run of a number that torch traces as a symbol."""
    if isinstance(x, bool | int | float):
        (x,) = {x}
    return x


def _captured(x: Any) -> Any:
    """The numbers that a function captures, and those captured by the functions that it calls."""
    if isinstance(x, bool | int | float):
        return _number(x)
    if isinstance(x, tuple):
        return tuple([_captured(one) for one in x])
    if isinstance(x, functools.partial):
        return _captured((x.func, x.args, tuple(x.keywords.values())))
    x = getattr(x, "py_func", x)
    if not isinstance(x, types.FunctionType):
        return None
    try:
        cells = x.__closure__ or ()
    except AttributeError:  # a function that the traced code makes has no __closure__
        cells = None
    names = _names(x, cells is not None).split()
    module = sys.modules[x.__module__]
    read = {name: getattr(module, name) for name in names if hasattr(module, name)}
    values = []
    if cells is not None:
        for name, cell in zip(x.__code__.co_freevars, cells, strict=True):
            read[name] = cell.cell_contents
        values += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    for pair in _attributes(x).split():
        owner, attribute = pair.split(".")
        if isinstance(read.get(owner), types.ModuleType) and read[owner] is not math:
            values.append(getattr(read[owner], attribute))
    return _captured((*read.values(), *values))


def _names(function: Any, from_outside: bool) -> str:
    """The globals that it reads. Refuses those whose changes torch.compile would not notice."""
    names = globals_of(function.__code__)
    if vars(sys.modules.get(function.__module__, types)) is not function.__globals__:
        raise NotImplementedError(f"{_place(function)} is of no module, and torch.compile cannot ask what it captures")
    own = [cell.cell_contents for cell in function.__closure__ or ()]
    own += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for value in (*own, *(function.__globals__.get(name) for name in names)):
        if isinstance(value, np.generic):
            raise NotImplementedError(f"{_place(function)} captures a number of NumPy: make it one of Python")
    if not from_outside and not all(isinstance(value, bool | int | float) for value in own):
        raise NotImplementedError(
            f"{_place(function)} is made in the code that torch.compile traces, where it may capture numbers, and no "
            "functions or tuples: make it outside"
        )
    return " ".join(names)


def _attributes(function: Any) -> str:
    return " ".join(map(".".join, attributes_of(function.__code__)))


def _place(function: Any) -> str:
    return f"{function.__name__} ({function.__code__.co_filename}, line {function.__code__.co_firstlineno})"


# torch.compile calls these and does not trace them.
for _constant in (_key, _names, _attributes, numbered_by_keys):
    vars(_constant)["_dynamo_marked_constant"] = True
