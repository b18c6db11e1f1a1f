"""What the gates found, kept while nothing has changed that could change it: compiling takes minutes.

A result is kept under a key of all that the project has a hand in: the code that the kernel's file imports, the Config,
and what the gate asks for. Comments and docstrings, which no compiler sees, may change. The compilers stand in the file
once. Where others are installed, nothing that is kept counts and every gate compiles, so that a new version of a
compiler is judged by what it makes and by nothing else.
Python's version is not looked at: the run of each week compiles everything on each Python (NUMBA_FLASH_FRESH_GATES=1).

`sh scripts/gates` compiles what has no result and writes the file.
"""

import ast
import functools
import hashlib
import importlib.util
import io
import json
import os
import re
import tokenize
from pathlib import Path

import numba_flash
from numba_flash.gpu import compiled

PACKAGE = Path(numba_flash.__file__).parent
FILE = Path(__file__).parents[1] / "unit" / "gate_results.json"
TO_WRITE = "run sh scripts/gates, and commit tests/unit/gate_results.json"
# Imports are followed into these rooms; what else shapes the code of every kernel.
ROOMS = ("kernels", "ptx", "config", "abi", "arrays.dtypes", "functions", "problem.ranges", "problem.options")
SIMULATED = "ptx.sim"  # no compiler sees it
WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OF_ALL = ("gpu.compiled", "gpu.assembler", "abi.arguments")


def kept(name, key):
    """What was found for a gate with this key by the compilers that are here, or None: {"key", "line", "wrong"}."""
    compilers, results = _read(FILE)
    if os.environ.get("NUMBA_FLASH_FRESH_GATES") or compilers != installed():
        return None
    result = results.get(name)
    return result if result and result["key"] == key else None


def keep(found, whole):
    """Write what was found, {gate: result}; whole: by all gates that there are, so that others are gone."""
    compilers, before = _read(FILE)
    results = found if whole or compilers != installed() else before | found
    _write(FILE, dict(compilers=installed(), gates=results))
    _read.cache_clear()


def chosen(config):
    """Whether pytest was asked for some tests only (-k, --deselect, a test by its id), so not all gates ran."""
    option = config.option
    given = (option.keyword, option.deselect, getattr(option, "lf", False), getattr(option, "failedfirst", False))
    return any(given) or any("[" in test for test in config.args)


def stale(keys):
    """-> (what is wrong with the file, by the keys of all gates, {gate: key}; which of them have no result there), in
    words."""
    _, results = _read(FILE)
    without = [name for name in keys if name not in results]
    changed = [name for name in keys if name in results and results[name]["key"] != keys[name]]
    gone = [name for name in results if name not in keys]
    named = {"changed since": changed, "no such gate": gone}
    wrong = "; ".join(f"{words}: {_few(names)}" for words, names in named.items() if names)
    return wrong, f"no result: {_few(without)}" if without else ""


def _few(names):
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


@functools.cache
def _read(file):
    """(the compilers, {gate: result})"""
    content = json.loads(file.read_text()) if file.exists() else dict(compilers=[], gates={})
    return content["compilers"], content["gates"]


def _write(file, content):
    file.write_text(json.dumps(content, indent=0, sort_keys=True) + "\n")


def installed():
    """The compilers with their versions, by the names of their packages."""
    return sorted({folder.rpartition(".")[0] for folder in compiled.compilers()})


def key(config, asked):
    """asked: whatever else the gate's verdict depends on, as something whose repr says it all.

    Of a caller's function that is its source: what names it in the disk cache depends on Python's version.
    """
    text = re.sub(r"(Function\('\w+'), \w+\)", r"\1)", repr([config, asked, sources_of(config.module)]))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def sources_of(module):
    """A hash of the code that the kernels of this file are made of."""
    found = reached_from(f"kernels.{module}") | set(OF_ALL)
    digest = hashlib.sha256()
    for module in sorted(found):
        digest.update(f"{module}\n{code_of(path_of(module))}\n".encode())
    return digest.hexdigest()


@functools.cache
def code_of(path):
    """The lines of a file without comments, docstrings and what is empty."""
    text = path.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRINGS) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno, docstring.end_lineno + 1):
                lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def reached_from(module):
    """The modules of ROOMS that are imported from this one on, itself included."""
    found, ahead = set(), [module]
    while ahead:
        module = ahead.pop()
        seen = module in found or module.startswith(SIMULATED)
        if not seen and module.startswith(ROOMS) and path_of(module) is not None:
            found.add(module)
            ahead += imported_by(module)
    return found


@functools.cache
def imported_by(module):
    """Names of modules, and of what is in them."""
    path, found = path_of(module), []
    package = f"numba_flash.{module}" if path.name == "__init__.py" else f"numba_flash.{module}".rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            base = base.partition(".")[2]
            found += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return found


@functools.cache
def path_of(module):
    """Its file, or None where there is no such module: a name that is imported from one."""
    folder = PACKAGE / module.replace(".", "/")
    return next((path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.exists()), None)
