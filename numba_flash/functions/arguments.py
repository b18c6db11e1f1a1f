"""Which of its arguments a function reads, as its bytecode says: what is not read changes no result.

Not every function that ignores an argument is found. One that hands it on to another function counts as reading it.
"""

import dis
import functools
import inspect
import types

from .function import Function, Tree


@functools.lru_cache(maxsize=1000)
def reads_argument(function: Function, number: int) -> bool:
    """Whether the argument with this number, from 0 on, may change what is computed. In doubt it may."""
    return _reads(function.tree, number)


def _reads(tree: Tree, number: int) -> bool:
    if tree[0] == "partial":
        _, inner, arguments, named = tree
        return bool(named) or _reads(inner, number + len(arguments))
    code: types.CodeType = tree[1]
    if number >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[number]
    if name in code.co_cellvars:  # a function inside of it has it
        return True
    # Newer Pythons read two in one instruction, whose argument then is a pair.
    return any(name == x.argval or isinstance(x.argval, tuple) and name in x.argval for x in dis.get_instructions(code))
