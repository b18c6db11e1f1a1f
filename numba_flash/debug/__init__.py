"""Look into a kernel while it runs, without editing it: in Numba's simulator.

`stop_at` opens Python's debugger at a line. `trace` asks nobody and returns what one row saw of every tile of keys.
`watch` records the variables of a kernel of your own at the lines that a comment marks, and `race_check` finds the
barrier that is missing in it. `traffic` counts the bytes that a kernel moves.
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
