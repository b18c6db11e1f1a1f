"""NVIDIA's numba-cuda, imported once and in one place, with what it needs to work.

Three things can go wrong between `pip install` and the first compile, and all three end here:

- NumPy 2.5 removed `np.row_stack`, which numba-cuda 0.30.4 looks up when its array module is
  imported. The name is lent for the time of that import and taken away again.
- Numba ships an older `numba.cuda` of its own; a `.pth` file of numba-cuda's swaps it, but only from
  a site directory. Importing the redirector does the same by hand.
- numba-cuda or a driver may be missing: `unusable()` says which, in words for a person.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from .cache_folder import bundle_folder
from .forked import compile_lock

_LENT_NAMES = {"row_stack": "vstack"}  # name that numba-cuda looks up -> the function it always was


@contextlib.contextmanager
def numpy_names() -> Iterator[None]:
    """Lend NumPy the names that numba-cuda still looks up at import; NumPy leaves as it came."""
    missing = [name for name in _LENT_NAMES if name not in np.__dict__]
    for name in missing:
        setattr(np, name, getattr(np, _LENT_NAMES[name]))
    try:
        yield
    finally:
        for name in missing:
            delattr(np, name)


@contextlib.contextmanager
def keeping_garbage() -> Iterator[None]:
    """Turns the garbage collector off: Numba makes many objects that stay, and is a sixth faster, or more."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Makes Numba compile faster, to the same code. One thread compiles at a time, as in Numba itself."""
    with compile_lock, keeping_garbage(), _remembering_signatures():
        yield


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Guards an import of Numba: one thread at a time, and Ctrl-C waits for its end.

    An interrupted import leaves Python with some of Numba's modules, and a new one then fails ("module 'numba' has no
    attribute 'core'"). A process that is forked off meanwhile would wait for the import's locks for ever.
    """
    with compile_lock, _interrupted_afterwards():
        yield


@contextlib.contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    handler, came = signal.getsignal(signal.SIGINT), []
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # signals are the main thread's; without a handler of Python's the process ends
        return
    try:
        signal.signal(signal.SIGINT, lambda *arguments: came.append(arguments))
    except ValueError:  # not the main interpreter
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[-1])


@contextlib.contextmanager
def _remembering_signatures() -> Iterator[None]:
    """Numba looks up the signature of an operator once for each set of argument types, and not at each use.

    Numba itself tries its candidates again for each `+`, of which a kernel has hundreds: an eighth of its compile time.
    The answer depends on nothing but the types. Types that are not determined yet, and functions as arguments, are
    looked up as ever.
    """
    from numba import types

    function_type: Any = next((base for base in types.Function.__mro__ if "get_call_type" in vars(base)), None)
    if function_type is None:  # another version of Numba: nothing is remembered
        yield
        return
    look_up = function_type.get_call_type
    found: dict[tuple, tuple] = {}

    def remembered(self: Any, context: Any, args: tuple, kws: dict) -> Any:
        if kws or not all(x.is_precise() and not isinstance(x, types.Callable) for x in args):
            return look_up(self, context, args, kws)
        key = (id(self), id(context), args)
        if key not in found:
            found[key] = look_up(self, context, args, kws), self, context  # keeps both alive, and so their ids
        return found[key][0]

    function_type.get_call_type = remembered
    try:
        yield
    finally:
        function_type.get_call_type = look_up


def simulated() -> bool:
    """Whether Numba's CUDA simulator is on (NUMBA_ENABLE_CUDASIM=1 before Numba is imported)."""
    numba_config = getattr(sys.modules.get("numba"), "config", None)  # absent too while another thread imports Numba
    if numba_config is not None:
        return bool(numba_config.ENABLE_CUDASIM)
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def jit_disabled() -> bool:
    """Whether Numba's njit compiles nothing (NUMBA_DISABLE_JIT=1). GPU kernels and the simulator do not mind."""
    numba_config = getattr(sys.modules.get("numba"), "config", None)
    if numba_config is not None:
        return bool(numba_config.DISABLE_JIT)
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@functools.cache
def cuda() -> ModuleType:
    """The module `numba.cuda`, ready to compile. Raises ImportError with the remedy."""
    with contextlib.suppress(ImportError):
        importlib.import_module("_numba_cuda_redirector")
    with importing(), numpy_names(), warnings.catch_warnings(), keeping_garbage():
        warnings.filterwarnings(
            "ignore", "The 'generic' unit", DeprecationWarning
        )  # NumPy 2.5 about numba-cuda's import
        module = importlib.import_module("numba.cuda")
        if simulated():
            return module
        if getattr(module, "implementation", "") != "NVIDIA":
            raise ImportError(
                f"numba.cuda is Numba's built-in copy; numba_flash needs NVIDIA's numba-cuda: {_remedy()}"
            )
        # Imports everything the first compile would import, while the names are lent.
        importlib.import_module("numba.cuda.descriptor").cuda_target.target_context.refresh()
    return module


def _remedy() -> str:
    if sys.platform == "darwin":
        return "there is none for macOS, where GPU kernels run in the simulator (NUMBA_ENABLE_CUDASIM=1) alone"
    return "pip install 'numba-flash[cu13]', or [cu12], after your driver's CUDA"


@functools.cache
def unusable() -> str | None:
    """Why no GPU can be used here, or None when device 0 can.

    Numba itself is not imported: a kernel that is in the disk cache or in a bundle runs without it.
    """
    if simulated():
        return None
    for package in ("cuda.core",) if bundle_folder() else ("numba_cuda", "cuda.core"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed: {_remedy()}"
    try:
        from cuda.core import Device

        Device(0).compute_capability  # noqa: B018 - asks the driver
    except Exception as error:  # whatever the driver or its absence raises, it is the reason
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
