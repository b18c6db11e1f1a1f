"""A trace as one page of HTML: trace.html of this folder, with the numbers in it."""

import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = Path(__file__).with_name("trace.html")
FRAME_HEIGHT = 820  # pixels in a notebook
AS_TALL_AS_ITS_PAGE = "this.style.height = this.contentDocument.documentElement.scrollHeight + 'px'"


def page(trace: Any) -> str:
    # Within <script> only "<" could end the element.
    data = json.dumps(_data(trace), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)


def frame(trace: Any) -> str:
    """The page in a notebook: in a frame, so that neither changes how the other looks."""
    text = html.escape(page(trace), quote=True)
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    return f'<iframe srcdoc="{text}" style="{style}" onload="{AS_TALL_AS_ITS_PAGE}" title="trace"></iframe>'


def _data(trace: Any) -> dict[str, Any]:
    return dict(
        kernel=trace.kernel,
        about=trace.about,
        batch=trace.batch,
        head=trace.head,
        divided=trace.divided,
        rows=[_row(trace.of_row(number)) for number in trace.rows],
    )


def _row(trace: Any) -> dict[str, Any]:
    tiles = [
        dict(
            number=tile.number,
            first=tile.keys.start,
            end=tile.keys.stop,
            S=_plain(tile.S),
            P=_plain(tile.P),
            m=_plain(tile.m),
            alpha=_plain(tile.alpha),
            l=_plain(tile.l),
            O=_plain(tile.O),
            variables={name: _plain(value) for name, value in tile.variables.items()},
        )
        for tile in trace.tiles
    ]
    return dict(row=trace.row, tiles=tiles, o=_plain(trace.o), lse=_plain(trace.lse))


def _plain(value: Any) -> Any:
    """A number as JSON can have it: infinities and NaN become text."""
    if isinstance(value, np.ndarray):
        return [_plain(x) for x in value]
    number = float(value)
    return float(f"{number:.7g}") if math.isfinite(number) else str(number)
