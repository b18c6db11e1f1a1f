"""Look into a kernel while it runs in Numba's simulator, without editing it.

`stop_at` opens Python's debugger at a line. `trace` returns the values of one row after every tile of keys. `watch`
records the variables of your own kernel at lines marked by a comment, and `race_check` finds a missing barrier in it.
`traffic` counts the bytes that a kernel moves.
`timeline` returns which role of a `wgmma` block waits for which. `worked_example` is a problem of four keys that can be
followed by hand.
"""

from .races import race_check
from .stop import stop_at
from .timeline import Span, Timeline, timeline
from .trace import Tile, Trace, trace
from .traffic import Traffic, traffic
from .watch import Seen, watch
from .worked_example import worked_example

__all__ = [
    "Seen",
    "Span",
    "Tile",
    "Timeline",
    "Trace",
    "Traffic",
    "race_check",
    "stop_at",
    "timeline",
    "trace",
    "traffic",
    "watch",
    "worked_example",
]
