"""Device functions that belong together, under their own names.

A maker of device functions returns `named(load, store)`. Its caller reads `made.load`, which is the function `load` in
the maker's file: there its docstring says what it takes.
"""

import collections
import functools


def named(*functions, **others):
    """A NamedTuple of functions and of other values."""
    found = {function.__name__: function for function in functions} | others
    return _type(tuple(found))(**found)


@functools.cache
def _type(names: tuple[str, ...]):
    return collections.namedtuple("Functions", names)  # type: ignore[misc]
