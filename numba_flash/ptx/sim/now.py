"""The simulated thread that is running. There is one at most: launches come one at a time, and threads take turns."""

from typing import Any

thread: Any = None
outer: Any = None  # the trace function of the thread of Python that launches
follow: Any = None  # the trace function that a thread begins with (debug/places.py)


def current():
    """The thread that executes an instruction."""
    if thread is None:
        raise RuntimeError("the simulator's instructions run in kernels that sim.launch.run launches")
    return thread
