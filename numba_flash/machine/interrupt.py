"""Ctrl-C while compiled code runs. Python itself notices it only when that code returns, which may take minutes.

A signal's handler in C writes a byte into a socket at once, whatever runs (signal.set_wakeup_fd). Here a thread waits
for that byte and sets a number that the compiled code looks at from time to time. So it returns early, and Python
raises KeyboardInterrupt as it always does.
"""

import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable

import numpy as np

LONG_SECONDS = 20e-3  # below this, by a rough count, a call is not worth the few microseconds that this takes
_never = np.zeros(1, np.int64)
NEVER = int(_never.ctypes.data)  # the address of a number that stays 0


def stoppable(run: Callable[[int], None]) -> None:
    """run(address): compiled code that gives up soon once the int64 at `address` is no longer 0.

    Signals are the main thread's: in another one the number stays 0.
    """
    if threading.current_thread() is not threading.main_thread():
        run(NEVER)
        return
    watcher, stop = _watcher(), np.zeros(1, np.int64)
    while True:
        stop[0] = 0
        try:
            watcher.before = signal.set_wakeup_fd(watcher.end, warn_on_full_buffer=False)
        except ValueError:  # not the main interpreter
            run(NEVER)
            return
        watcher.stop = stop
        try:
            run(int(stop.ctypes.data))  # Python handles a signal right behind it, and raises here
        finally:
            watcher.stop = None
            signal.set_wakeup_fd(watcher.before, warn_on_full_buffer=False)
        if not stop[0]:
            return
        # Somebody's own handler did not raise: the work is to be done after all.


def stoppable_if_long(seconds: float, run: Callable[[int], None]) -> None:
    """seconds: a rough estimate of how long `run` takes."""
    if seconds > LONG_SECONDS:
        stoppable(run)
    else:
        run(NEVER)


class _Watcher(threading.Thread):
    """Sets `stop` when a SIGINT comes. `before`: the descriptor that was told of signals before; it still is."""

    def __init__(self) -> None:
        super().__init__(name="numba_flash Ctrl-C", daemon=True)
        self.stop: np.ndarray | None = None
        self.before = -1
        self._listening, self._told = socket.socketpair()
        self._told.setblocking(False)
        self.end = self._told.fileno()

    def run(self) -> None:
        while True:
            signals = self._listening.recv(64)
            stop = self.stop
            if signal.SIGINT in signals and stop is not None:
                stop[0] = 1
            if self.before != -1:
                with contextlib.suppress(OSError):
                    os.write(self.before, signals)


@functools.cache
def _watcher() -> _Watcher:
    watcher = _Watcher()
    watcher.start()
    return watcher


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_watcher.cache_clear)  # a forked process has no threads of its parent's
