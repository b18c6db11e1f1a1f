"""A process that was forked off: the threads of its parent are not in it, and those who held locks are not either.

Imported with the package, so that it is told of every fork, also of one before the first call.
"""

import os
import sys
import threading
from typing import Any

launch_lock = threading.Lock()  # Numba's workqueue threads abort the process when launched twice at once
compile_lock = threading.RLock()  # held by whoever compiles or imports Numba
threads_lost = False  # GNU's OpenMP ends a forked process that asks for threads, when its parent has had some
_taken: list[Any] = []


def _before() -> None:
    """Waits until no thread compiles: half a compilation would stay so in the child, and its locks taken."""
    of_numba = getattr(sys.modules.get("numba.core.compiler_lock"), "global_compiler_lock", None)
    for lock in (compile_lock, of_numba):  # in the order in which a compile takes them
        if lock is not None:
            lock.acquire()
            _taken.append(lock)


def _after() -> None:
    while _taken:
        _taken.pop().release()


def _in_the_child() -> None:
    global launch_lock, threads_lost
    launch_lock = threading.Lock()
    try:
        threads_lost = "numba" in sys.modules and sys.modules["numba"].threading_layer() == "omp"
    except (ValueError, AttributeError):  # none has run, or Numba is being imported
        threads_lost = False
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_in_the_child)
