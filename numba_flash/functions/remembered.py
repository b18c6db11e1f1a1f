"""Limits how many functions are remembered, and warns about one that is compiled again and again."""

from collections.abc import Callable, Mapping
from typing import Any

from ..machine.announce import warn_caller

MOST = 200  # functions that are remembered, with everything compiled from them
VALUES = 3  # a function may be compiled for so many values of its captured numbers before a warning
# {a function's tree without floats: the values it was compiled for, or None after the warning}
_compiled: dict[Any, set[Any] | None] = {}
# Called when all functions are forgotten, to empty other caches of things made from functions.
forgetting: list[Callable[[], Any]] = []


def forget() -> None:
    for each in forgetting:
        each()
    _compiled.clear()


def note_compiled(functions: Mapping[str, Any]) -> None:
    """Warns once for each function that a number that changes belongs into aux. functions: by the argument's names."""
    for option, function in functions.items():
        shape = _without_floats(function.tree)
        if shape == function.tree:
            continue
        known = _compiled.setdefault(shape, set())
        if known is None:
            continue
        known.add(function)
        if len(known) >= VALUES:
            _compiled[shape] = None
            warn_caller(
                f"{option}: {function.where} was compiled {VALUES} times, for other numbers that it captures. Each "
                "time takes about a second, and a file in the cache folder. A number that changes can be passed in "
                "aux=(numpy.array(number),), and is read as x[()] from a further argument x"
            )


def _without_floats(tree: Any) -> Any:
    if not isinstance(tree, tuple):
        return tree
    return ("float",) if tree[:1] == ("float",) else tuple(map(_without_floats, tree))
