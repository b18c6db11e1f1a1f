"""A kernel's function as a generator, which stands still at any instruction at which its thread has to wait.

So all threads of a block run in one thread of Python, and need neither a thread of the system nor a stack of their own.
A stand-in that has to wait gives a Pause (thread.py), a generator, in place of its value. Here every call f(x) in a
function's file becomes

    (yield from r) if type(r := f(x)) is Pause else r

A function that calls nothing that waits is left as it is. Lines, names and closures stay, so a debugger shows what is
in the file, and only during a launch is it another code. A call in a comprehension or in a lambda stays as it is: there
Python cannot stand still, and an instruction that has to wait raises (scheduler.py).
"""

import ast
import builtins
import functools
import linecache
import os
import weakref
from types import CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

from . import views

NAMES = {"__Pause": GeneratorType, "__type": type, **views.NAMES}  # what the new code asks its module for
RESULT = ".result"  # a name that no program has
PLAIN = frozenset(vars(builtins))
OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
WAITING = {"wait", "sync", "let_others_run"}  # methods of threads and blocks that stand-ins call
OF_CUDA = ("syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "cg")
_waits: Any = weakref.WeakKeyDictionary()  # {function: whether it may wait}


def code_for(function: FunctionType, cudas: Any) -> CodeType:
    """The code of a kernel's function during a launch. cudas: Numba's and the simulated one."""
    code = function.__code__
    kind = _Calls if may_wait(function, cudas) else views.Views
    linecache.checkcache(code.co_filename)
    return _codes(code.co_filename, "".join(linecache.getlines(code.co_filename)), kind).get(code, code)


def is_of_the_kernel(function: FunctionType, cudas: Any) -> bool:
    """Whether this is no stand-in and may wait: a kernel's device function, though cuda.jit did not make it."""
    return not function.__code__.co_filename.startswith(OURS) and may_wait(function, cudas)


def may_wait(function: FunctionType, cudas: Any) -> bool:
    """Whether a function calls something that may wait, itself or by others."""
    if function not in _waits:
        _waits[function] = False  # if it calls itself
        _waits[function] = _reaches(function, cudas)
    return _waits[function]


def _reaches(function: FunctionType, cudas: Any) -> bool:
    names = _names_in(function.__code__)
    if "getattr" in names or (names & WAITING and function.__code__.co_filename.startswith(OURS)):
        return True
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # empty: its function is not made yet
            pass
    return any(_value_waits(value, names, cudas) for value in values)


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function and those inside it."""
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _value_waits(value: Any, names: set[str], cudas: Any) -> bool:
    if any(value is cuda for cuda in cudas):
        return any(name in names for name in OF_CUDA)
    if isinstance(value, ModuleType):
        if not value.__name__.startswith("numba_flash."):
            return False
        members = [getattr(value, name) for name in names if hasattr(value, name)]
        return any(_value_waits(member, names, cudas) for member in members)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return any(_value_waits(member, names, cudas) for member in value)
    value = getattr(value, "fn", value)  # a device function's own
    value = getattr(value, "__wrapped__", value)  # of functools.cache
    return isinstance(value, FunctionType) and may_wait(value, cudas)


@functools.lru_cache(512)
def _codes(path: str, text: str, kind: Any) -> dict[CodeType, CodeType]:
    """{code of a function in this file: the code that takes its place}, where the file is still what was imported."""
    if kind is views.Views and ".view(np." not in text:
        return {}
    given, other = (compile(tree, path, "exec") for tree in (ast.parse(text), kind().visit(ast.parse(text))))
    return {one: two for one, two in _pairs(given, other) if one != two}


def _pairs(one: CodeType, two: CodeType) -> Any:
    yield one, two
    for pair in zip(*([x for x in code.co_consts if isinstance(x, CodeType)] for code in (one, two)), strict=True):
        yield from _pairs(*pair)


class _Calls(views.Views):
    """Changes the calls in functions; not in what belongs to the code around them, such as decorators and defaults."""

    inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self.inside = self.inside, True
        node.body = [self.visit(line) for line in node.body]
        self.inside = before
        return node

    def visit_AsyncFunctionDef(self, node: ast.AST) -> ast.AST:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self.inside = self.inside, False
        node.body = [self.visit(line) for line in node.body]
        self.inside = before
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        before, self.inside = self.inside, True
        node.body = self.visit(node.body)
        self.inside = before
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_AsyncFunctionDef

    def visit_Call(self, node: ast.Call) -> ast.AST:
        call = super().visit_Call(node)
        if not self.inside or not isinstance(call, ast.Call) or (isinstance(call.func, ast.Name) and call.func.id in PLAIN):
            return call
        where = functools.partial(ast.copy_location, old_node=node)
        given = where(ast.NamedExpr(where(ast.Name(RESULT, ast.Store())), call))
        kind = where(ast.Call(where(ast.Name("__type", ast.Load())), [given], []))
        pauses = where(ast.Compare(kind, [where(ast.Is())], [where(ast.Name("__Pause", ast.Load()))]))
        result = where(ast.Name(RESULT, ast.Load()))
        return where(ast.IfExp(pauses, where(ast.YieldFrom(result)), result))
