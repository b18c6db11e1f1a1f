"""A trace as one page of HTML: trace.html of this folder, with the numbers in it."""

import html
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = Path(__file__).with_name("trace.html")
FRAME_HEIGHT = 1400  # pixels in a notebook, until the page in it says how tall it is


# {kernel: (number, first line, the loop over tiles of keys)} of docs/first_kernels.md, which a wheel does not have.
LISTINGS = {
    "v1": (
        4,
        2,
        """\
for each key tile j that some query sees:
    barrier;  load K_j and V_j into shared memory
    for each query tile i:
        barrier;  load Q_i into shared memory;  barrier
        thread k takes row k of Q_i, query n; it skips to the next i if n sees no key of tile j
        max_tmp <- -inf
        for each key y of the tile:
            s <- Q_i[k, :] . K_j[y, :]
            s <- s with scale and options, or -inf where n does not see the key
            S[k, y] <- s;  max_tmp <- max(max_tmp, s)
        skip to the next i if every s was -inf
        sum_tmp <- 0
        for each y:  S[k, y] <- e^(S[k, y] - max_tmp);  sum_tmp <- sum_tmp + S[k, y]
        sum_prev <- l[n];  max_prev <- m[n]
        max_new <- max(max_tmp, max_prev)
        old <- sum_prev * e^(max_prev - max_new);  new <- e^(max_tmp - max_new)
        sum_new <- sum_tmp * new + old
        l[n] <- sum_new;  m[n] <- max_new
        for each column x of V:
            value <- sum over y of S[k, y] * V_j[y, x]
            O[n, x] <- O[n, x] * (old / sum_new) + (new / sum_new) * value""",
    ),
    "v2": (
        5,
        5,
        """\
for each key tile j that some row of the query tile sees:
    barrier;  load K_j and V_j into shared memory;  barrier
    max_tmp <- -inf
    for each key y of the tile:
        s <- Q_i[k, :] . K_j[y, :]
        s <- s with scale and options, or -inf where n does not see the key
        S[k, y] <- s;  max_tmp <- max(max_tmp, s)
    skip to the next j if every s was -inf
    m_new <- max(max_tmp, m)
    alpha <- e^(m - m_new)
    sum_tmp <- 0
    for each y:  S[k, y] <- e^(S[k, y] - m_new);  sum_tmp <- sum_tmp + S[k, y]
    l <- alpha * l + sum_tmp;  m <- m_new
    for each column x of V:  O_k[x] <- alpha * O_k[x] + sum over y of S[k, y] * V_j[y, x]""",
    ),
}


def page(trace: Any) -> str:
    # Within <script> only "<" could end the element.
    data = json.dumps(_data(trace), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return TEMPLATE.read_text(encoding="utf-8").replace("{{data}}", data)


def frame(trace: Any) -> str:
    """The page in a notebook: in a frame, so that neither changes how the other looks."""
    text = html.escape(page(trace), quote=True)
    style = f"width:100%;height:{FRAME_HEIGHT}px;border:0"
    return f'<iframe srcdoc="{text}" style="{style}" title="trace"></iframe>'


def _data(trace: Any) -> dict[str, Any]:
    number, first, text = LISTINGS[trace.kernel]
    return dict(
        kernel=trace.kernel,
        listing=dict(number=number, first=first, lines=text.splitlines()),
        tile_sizes=trace.tile_sizes,
        sees=trace.sees.tolist(),
        seqlen_k=trace.seqlen_k,
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
