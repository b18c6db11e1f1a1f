"""What the gates found, kept while nothing has changed that could change it: compiling takes minutes.

A result is kept under a key of all that shapes the code: the sources that the kernel's file imports, the Config, the
compilers, and what the gate asks for. `sh scripts/gates` compiles what has no result with its key and writes the file.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numba_flash
from numba_flash.gpu import compiled

PACKAGE = Path(numba_flash.__file__).parent
FILE = Path(__file__).parent / "unit" / "gate_results.json"
# Imports are followed into these rooms; what else shapes the code of every kernel.
ROOMS = ("kernels", "ptx", "config", "functions", "problem.ranges", "problem.options")
OF_ALL = ("gpu.compiled", "gpu.assembler", "select.arguments")


@functools.cache
def kept():
    """{gate: {"key", "line", "wrong"}}"""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def keep(found):
    """Write the results of a run: {gate: ...} of all gates that there are."""
    FILE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


def key(config, asked):
    """asked: whatever else the gate's verdict depends on, as something whose repr says it all."""
    parts = [config, asked, compiled._compilers(), sys.version_info[:2], sources_of(config.kernel)]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@functools.cache
def sources_of(kernel):
    """A hash of the files that this kernel is made of."""
    found = reached_from(f"kernels.{compiled.MODULES[kernel]}") | set(OF_ALL)
    digest = hashlib.sha256()
    for module in sorted(found):
        digest.update(module.encode() + path_of(module).read_bytes())
    return digest.hexdigest()


def reached_from(module):
    """The modules of ROOMS that are imported from this one on, itself included."""
    found, ahead = set(), [module]
    while ahead:
        module = ahead.pop()
        if module not in found and module.startswith(ROOMS) and path_of(module) is not None:
            found.add(module)
            ahead += imported_by(module)
    return found


def imported_by(module):
    path = path_of(module)
    package = f"numba_flash.{module}" if path.name == "__init__.py" else f"numba_flash.{module}".rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            base = base.partition(".")[2]
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def path_of(module):
    """Its file, or None where there is no such module: a name that is imported from one."""
    folder = PACKAGE / module.replace(".", "/")
    return next((path for path in (folder.with_suffix(".py"), folder / "__init__.py") if path.exists()), None)
