"""A process that was forked off: the threads of its parent are not in it, and those who held locks are not either.

Imported with the package, so that it is told of every fork, also of one before the first call.
"""

import os
import sys
import threading

launch_lock = threading.Lock()  # Numba's workqueue threads abort the process when launched twice at once
threads_lost = False  # GNU's OpenMP ends a forked process that asks for threads, when its parent has had some


def _in_the_child() -> None:
    global launch_lock, threads_lost
    launch_lock = threading.Lock()
    try:
        threads_lost = "numba" in sys.modules and sys.modules["numba"].threading_layer() == "omp"
    except (ValueError, AttributeError):  # none has run, or Numba is being imported
        threads_lost = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_the_child)
