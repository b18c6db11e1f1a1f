"""A kernel's function as a generator, which stands still wherever its thread has to wait.

So all threads of a block run in one thread of Python, and need neither threads of the system nor stacks of their own. A
stand-in that has to wait gives a Pause (thread.py), a generator, in place of its value. In a function that may come to
one, every call f(x) becomes

    (yield from r) if type(r := f(x)) is Pause else r

Lines, names and closures stay, so a debugger shows what is in the file. Only during a launch is it another code. In a
comprehension Python cannot stand still, so calls there stay as they are; thread.py raises if one has to wait.
"""

import ast
import functools
import linecache
import os
import weakref
from types import CellType, CodeType, FunctionType, GeneratorType, ModuleType
from typing import Any

from . import views

NAMES = {"__Pause": GeneratorType, "__type": type, **views.NAMES}  # globals that the new code reads
RESULT = ".result"  # a name that no program has
OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
WAITING = {"wait", "sync", "let_others_run"}  # methods of a block and its turns that stand-ins call
OF_CUDA = {"syncthreads", "syncthreads_count", "syncthreads_and", "syncthreads_or", "cg"}
_texts: dict[str, dict[str, bool]] = {}  # file -> all texts that it had
_waits: Any = weakref.WeakKeyDictionary()  # {function: whether it may wait}


def code_for(function: FunctionType, cudas: Any) -> CodeType:
    """The code of a kernel's function during a launch. cudas: Numba's and the simulated one."""
    code = function.__code__
    kind = _Calls if "getattr" in code.co_names or may_wait(function, cudas) else views.Views
    path = code.co_filename
    for text in _texts.get(path, ()):
        if code in (codes := _codes(path, text, kind)):
            return codes[code]
    linecache.checkcache(path)  # the file may have changed, and the function may be of before or of now
    text = "".join(linecache.getlines(path))
    _texts.setdefault(path, {})[text] = True
    return _codes(path, text, kind).get(code, code)


def is_of_the_kernel(function: FunctionType, cudas: Any) -> bool:
    """Whether this is no stand-in and may wait: a kernel's device function, though cuda.jit did not make it."""
    return not function.__code__.co_filename.startswith(OURS) and may_wait(function, cudas)


def may_wait(function: FunctionType, cudas: Any) -> bool:
    """Whether a function names something that may wait: a stand-in, cuda.syncthreads, or such a function."""
    if function not in _waits:
        met: Any = weakref.WeakSet()
        if not _finds_a_wait(function, cudas, met):
            _waits.update(dict.fromkeys(met, False))
    return bool(_waits[function])


def _finds_a_wait(function: FunctionType, cudas: Any, met: Any) -> bool:
    """met: the functions that this search has entered. It enters none twice, so a False may be that of a cycle: it is
    remembered only if the whole search found nothing."""
    if function in _waits:
        return bool(_waits[function])
    if function in met:
        return False
    met.add(function)
    code = function.__code__
    names = _names_in(code)
    found = bool(names & WAITING) and code.co_filename.startswith(OURS)
    if not found:
        values = [function.__globals__[name] for name in names if name in function.__globals__]
        values += [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        found = any(_value_waits(value, names, function, cudas, met) for value in values)
    if found:
        _waits[function] = True
    return found


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function and those inside it."""
    return set(code.co_names).union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _value_waits(value: Any, names: set[str], of: FunctionType, cudas: Any, met: Any) -> bool:
    """Whether a value that `of` sees may wait. names: those in `of`."""
    if any(value is cuda for cuda in cudas):
        return bool(names & OF_CUDA)
    if isinstance(value, ModuleType):
        members = [vars(value)[name] for name in names & vars(value).keys()]
        return any(_value_waits(x, names, of, cudas, met) for x in members if not isinstance(x, ModuleType))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return any(_value_waits(member, names, of, cudas, met) for member in value)
    device = getattr(value, "fn", None)
    if isinstance(device, FunctionType):
        return _finds_a_wait(device, cudas, met)
    value = getattr(value, "__wrapped__", value)  # of functools.cache
    if not isinstance(value, FunctionType):
        return False
    near = value.__globals__ is of.__globals__ or value.__module__.startswith("numba_flash.")
    return near and _finds_a_wait(value, cudas, met)


@functools.lru_cache(512)
def _codes(path: str, text: str, kind: Any) -> dict[CodeType, CodeType]:
    """{code of a function in this text: the code that takes its place}"""
    given, other = (compile(tree, path, "exec") for tree in (ast.parse(text), kind().visit(ast.parse(text))))
    return dict(_pairs(given, other))


def _pairs(one: CodeType, two: CodeType) -> Any:
    yield one, two
    for pair in zip(*([x for x in code.co_consts if isinstance(x, CodeType)] for code in (one, two)), strict=True):
        yield from _pairs(*pair)


class _Calls(views.Views):
    """Changes the calls in functions; not in what belongs to the code around them, such as decorators and defaults."""

    inside = False

    def visit_FunctionDef(self, node: Any) -> ast.AST:
        before, self.inside = self.inside, True
        body = node.body
        node.body = self.visit(body) if isinstance(body, ast.AST) else [self.visit(line) for line in body]
        self.inside = before
        return node

    visit_Lambda = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        before, self.inside = self.inside, False
        node.body = [self.visit(line) for line in node.body]
        self.inside = before
        return node

    def visit_AsyncFunctionDef(self, node: ast.AST) -> ast.AST:
        return node

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_AsyncFunctionDef

    def visit_Call(self, node: ast.Call) -> ast.AST:
        call = super().visit_Call(node)
        if call is not node or not self.inside:
            return call
        where = functools.partial(ast.copy_location, old_node=node)
        given = where(ast.NamedExpr(where(ast.Name(RESULT, ast.Store())), call))
        kind = where(ast.Call(where(ast.Name("__type", ast.Load())), [given], []))
        pauses = where(ast.Compare(kind, [where(ast.Is())], [where(ast.Name("__Pause", ast.Load()))]))
        result = where(ast.Name(RESULT, ast.Load()))
        return where(ast.IfExp(pauses, where(ast.YieldFrom(result)), result))
