"""Look into a kernel while it runs, without editing it: in Numba's simulator, where a GPU thread is a Python thread.

`stop_at` opens Python's debugger at a line. `trace` asks nobody and returns what one row saw of every tile of keys.
`timeline` returns which role of a `wgmma` block waits for which. `worked_example` is a problem of four keys that can be
followed by hand.
"""

from .stop import stop_at
from .timeline import Span, Timeline, timeline
from .trace import Tile, Trace, trace
from .worked_example import worked_example

__all__ = ["Span", "Tile", "Timeline", "Trace", "stop_at", "timeline", "trace", "worked_example"]
