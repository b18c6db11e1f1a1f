"""What people who wait are told on stderr: that something compiles. Only in a terminal: a log is not told."""

import os
import sys


def announce(text: str, end: str = "\n") -> None:
    """NUMBA_FLASH_QUIET=1 silences it."""
    if os.environ.get("NUMBA_FLASH_QUIET", "0") not in ("", "0"):
        return
    if sys.stderr is not None and sys.stderr.isatty():
        print(text, end=end, file=sys.stderr, flush=True)
