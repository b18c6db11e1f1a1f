"""Look into a kernel while it runs, without editing it: in Numba's simulator, where a GPU thread is a Python thread.

`stop_at` opens Python's debugger at a line. `trace` asks nobody and returns what one row saw of every tile of keys.
`watch` records the variables of a kernel of your own at the lines that a comment marks, and `race_check` finds the
barrier that is missing in it. `traffic` counts the bytes that a kernel moves.
"""

from .races import race_check
from .stop import stop_at
from .trace import Tile, Trace, trace
from .traffic import Traffic, traffic
from .watch import Seen, watch

__all__ = ["Seen", "Tile", "Trace", "Traffic", "race_check", "stop_at", "trace", "traffic", "watch"]
