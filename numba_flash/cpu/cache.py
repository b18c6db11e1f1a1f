"""The disk cache of the CPU rung's compiled code.

Numba's own cache=True notices changes only of the file that has a function, but this code is built from several files;
and it trusts whatever it finds. Here an entry is one file. Its name contains everything that determines the code
(signature, processor, sources, versions), and it starts with a checksum of the rest. An entry that cannot be read is
compiled again, and one that cannot be written is not kept. Processes that write the same entry at once replace each
other's whole file.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator
from numba.core.ccallback import CFunc
from numba.core.serialize import dumps
from numba.core.sigutils import normalize_signature

from ..machine import toolchain
from ..machine.announce import announce
from ..machine.cache_folder import cache_folder, complain, keep_within

# The sources that are compiled into the CPU's kernels; options.py has the places of a call's arrays.
SOURCES = ("cpu/**/*.py", "functions/**/*.py", "problem/ranges.py", "problem/options.py")


def entries_folder() -> Path:
    return cache_folder() / "cpu"


@functools.cache
def source_stamp() -> str:
    """A hash of all sources that are compiled and of the compilers."""
    digest = hashlib.sha256(repr((numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)).encode())
    package = Path(__file__).parents[1]
    for file in sorted(file for pattern in SOURCES for file in package.glob(pattern)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _Locator(_CacheLocator):
    def get_cache_path(self) -> str:
        return str(entries_folder())

    def get_source_stamp(self) -> str:
        return ""  # it is in the entry's name; read here, sources that are not on disk would stop the import

    def get_disambiguator(self) -> str:
        return "numba_flash"

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> "_Locator":
        return cls()


class _Impl(CompileResultCacheImpl):
    def __init__(self, py_func: Any) -> None:
        self._locator_classes: Any = [_Locator]
        super().__init__(py_func)
        self._locator = _Locator()  # not one of NUMBA_CACHE_LOCATOR_CLASSES


class Entries:
    """The files of a function's entries, instead of Numba's index and data files."""

    def __init__(self, name: str) -> None:
        self.name = name

    def path(self, key: Any) -> Path:
        digest = hashlib.sha256(repr((source_stamp(), key)).encode()).hexdigest()
        return entries_folder() / f"{self.name}-{digest[:32]}.nbc"

    def load(self, key: Any) -> Any:
        path = self.path(key)
        content = path.read_bytes()
        with contextlib.suppress(OSError):
            os.utime(path)  # marks the entry as used now
        if hashlib.sha256(content[32:]).digest() != content[:32]:
            raise ValueError("damaged entry")
        return pickle.loads(content[32:])

    def save(self, key: Any, data: Any) -> None:
        content = dumps(data)
        path = self.path(key)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        keep_within(path.parent, path.suffix)


class Cache(FunctionCache):
    """Numba's cache of a function, with the entries above. A failure to load or save one is not an error."""

    _impl_class = _Impl

    def __init__(self, py_func: Any, announcement: str = "", key: str = "") -> None:
        super().__init__(py_func)
        self._cache_file = Entries(py_func.__name__)
        self._announcement, self._key = announcement, key

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        """`key` identifies code that closes over functions; Numba would pickle the function objects instead."""
        return (sig, codegen.magic_tuple(), self._key) if self._key else super()._index_key(sig, codegen)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = None
        with contextlib.suppress(Exception):
            found = super().load_overload(sig, target_context)
        if found is None and self._announcement:
            announce(self._announcement)
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        failed: OSError | None = None
        with contextlib.suppress(Exception):
            try:
                super().save_overload(sig, data)
            except OSError as error:
                failed = error
        if failed is not None:
            complain(failed)


def cached(dispatcher: Any) -> Any:
    """An njit function with the cache above."""
    dispatcher._cache = Cache(dispatcher.py_func)
    return dispatcher


def compile_for(dispatcher: Any, types: tuple) -> None:
    """Compiles an njit function for these types, unless it is compiled already."""
    with toolchain.compiling():
        dispatcher.compile(types)


def c_function(function: Any, signature: str, announcement: str = "", key: str = "") -> Any:
    """`function` compiled for calls by address, with the cache above. key: identifies what its closure computes."""
    made: Any = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
    made._cache = Cache(function, announcement, key)
    with toolchain.compiling():
        made.compile()
    return made
