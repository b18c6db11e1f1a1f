"""Turns a compiler's error about a caller's function into a few words with the argument's name and the line."""

import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .checks import place
from .function import WHAT_TO_WRITE, Function

MARK = "numba_flash: "  # marks the part of a compiler's error that a user should read
# Texts that the rungs that run Python use, too.
NOT_WHOLE = "whole numbers, and int() makes one of another"
NOT_ITERABLE = "an aux array is read, as x[i], before it is computed with; for loops are over range(len(x))"
AT_CONSTANTS = "a tuple is read at constants alone: put its numbers into an array, and pass it in aux="


def takes(name: str, count: int | None, kinds: Iterable[str]) -> str:
    """Message: a function takes `count` numbers (0: an array or a tuple, None: two or more), not these kinds."""
    wanted = {0: "an aux array or a tuple", 1: "a number", 2: "two numbers", None: "two numbers or more"}[count]
    return f"{name}() takes {wanted} here, not ({', '.join(kinds)})"


def too_many_numbers(ndim: int, count: int) -> str:
    return f"an aux array has {ndim} dimensions, and it is read at {count} numbers"


def explained(error: Exception, functions: Mapping[str, Function]) -> Exception | None:
    """The exception to raise in place of a compiler's error; None if the error is not about what functions do.

    functions: those that were compiled, by the argument's names.
    """
    text = _text_of(error)
    marked = re.search(f"{MARK}(.*)", text)
    if marked and re.match(r"\w+ must return", marked[1]):  # it says everything
        return TypeError(marked[1])
    for option, function in functions.items():
        codes = list(_codes_in(function.tree))
        for path, line in re.findall(r'(?: at |File ")([^"\n]*?)(?:", line | \()(\d+)', text):
            for code in codes:
                lines = [number for *_, number in code.co_lines() if number]
                if os.path.basename(path) == os.path.basename(code.co_filename) and int(line) in lines:
                    why = marked[1] if marked else _first_words(text)
                    more = f"{WHAT_TO_WRITE[0].upper()}{WHAT_TO_WRITE[1:]}"
                    return TypeError(f"{option}: {place(code, int(line))}: {why}. {more}")
    where = " or ".join(f"{option}: {function.where}" for option, function in functions.items())
    if marked:
        return TypeError(f"{where}: {marked[1]}")
    if type(error).__module__.startswith("numba.") or isinstance(error, _OF_COMPILERS):
        return TypeError(f"{where}: it cannot be compiled: {_first_words(text)}")
    return None


_OF_COMPILERS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)


def _text_of(error: Exception) -> str:
    at = getattr(error, "loc", None)
    text = str(error) or type(error).__name__
    return re.sub(r"\x1b\[[0-9;]*m", "", text) + (f" at {at.filename} ({at.line})" if at else "")


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
    words = re.sub(r"whole\([^()]*\)", "int", lines[0] if lines else "it cannot be compiled")
    words = re.sub(r"(real|dual)\([^()]*\)", "float", words)
    return re.sub(r"table\(.*?\)", "an aux array", words)[:200].rstrip(".: ")
