"""Finds in a function's bytecode which arguments it reads: an argument that is not read changes no result.

Some functions that ignore an argument are not recognised: passing it on to another function counts as reading it.
"""

import dis
import functools
import inspect
import types

from .function import Function, Tree


@functools.lru_cache(maxsize=1000)
def reads_argument(function: Function, number: int) -> bool:
    """Whether the argument with this index may change the result; True in doubt. Indices count from 0, without ROW."""
    return _reads(function.tree, number + (function.row_at is not None and function.row_at <= number))


def _reads(tree: Tree, number: int) -> bool:
    if tree[0] == "partial":
        _, inner, arguments, named = tree
        return bool(named) or _reads(inner, number + len(arguments))
    code: types.CodeType = tree[1]
    if number >= code.co_argcount:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[number]
    if name in code.co_cellvars:  # an inner function has it
        return True
    # Newer Pythons read two arguments in one instruction, whose operand is then a pair.
    return any(name == x.argval or isinstance(x.argval, tuple) and name in x.argval for x in dis.get_instructions(code))
