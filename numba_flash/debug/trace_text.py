"""A trace as a table."""

import math
from typing import Any

import numpy as np

MOST_ROWS = 4


def table(trace: Any) -> str:
    lines = [f"kernel {trace.kernel!r}: {trace.about}"]
    for number in trace.rows[:MOST_ROWS]:
        lines += _of_row(trace.of_row(number))
    if len(trace.rows) > MOST_ROWS:
        lines.append(f"... and {len(trace.rows) - MOST_ROWS} queries more; of_row(n) has one of them")
    lines.append("Each tile has S, m, alpha, P, l, O and the kernel's variables; plot() draws, html() makes a page.")
    return "\n".join(lines)


def _of_row(trace: Any) -> list[str]:
    lines = [
        f"query {trace.row} of head {trace.head}, batch entry {trace.batch}",
        f"{'tile':>6}  {'keys':<11}{'seen':>6}  {'max S':>9}  {'m':>9}  {'alpha':>9}  {'sum P':>9}  {'l':>9}",
    ]
    for tile in trace.tiles:
        seen = int(np.count_nonzero(tile.S != -math.inf))
        numbers = (tile.S.max(initial=-math.inf), tile.m, tile.alpha, tile.P.sum(), tile.l)
        keys = f"{tile.keys.start} to {tile.keys.stop - 1}"
        lines.append(f"{tile.number:>6}  {keys:<11}{seen:>6}  " + "  ".join(f"{float(x):>9.4f}" for x in numbers))
    lines.append(f"{'':>6}  lse {float(trace.lse):.4f}; o {_short(trace.o)}")
    return lines


def _short(o: np.ndarray) -> str:
    shown = " ".join(f"{x:.3f}" for x in o[:6])
    return f"[{shown}{' ...' if len(o) > 6 else ''}]"
