"""Tells people, on stderr, that something compiles, and warns them at their own line."""

import os
import sys
import warnings


def announce(text: str, end: str = "\n") -> None:
    """Writes to stderr, for people who wait: only to a terminal, not to a log. NUMBA_FLASH_QUIET=1 silences it."""
    if os.environ.get("NUMBA_FLASH_QUIET", "0") not in ("", "0"):
        return
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)


def warn_caller(text: str) -> None:
    """Gives a RuntimeWarning at the line that called into numba_flash, however deep this is."""
    frame, level = sys._getframe(1), 2
    ours = __name__.partition(".")[0], "numba"  # Numba's compiler calls this package's cache
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ours:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)
