"""One traced row as a matplotlib Figure."""

import io
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#1f5fa8", "#d9772b", "#9a9a9a"
COMPONENTS = 5  # columns of O that are drawn; all of them would be unreadable


class Shown(Figure):
    """A Figure that a notebook shows also where matplotlib's own pictures are not switched on."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def plot(trace: Any) -> Figure:
    # Figure without pyplot: no window system is asked for, and no global state is left behind.
    figure = Shown(figsize=(8, 7), layout="constrained")
    figure.suptitle(f"query {trace.row}: what kernel {trace.kernel!r} held after each tile of keys")
    scores, sums, outputs = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    draw_scores(scores, trace)
    draw_sums(sums, trace)
    draw_output(outputs, trace)
    return figure


def draw_scores(axes: Axes, trace: Any) -> None:
    """The scores of all keys as bars; m as a line over each tile; alpha where it is not 1."""
    for number, tile in enumerate(trace.tiles):
        labels = ("S, a score", "m, the largest so far") if number == 0 else ("", "")
        seen = np.isfinite(tile.S)
        axes.bar(np.array(tile.keys)[seen], tile.S[seen], color=BLUE, width=0.7, label=labels[0])
        if np.isfinite(tile.m):
            edges = tile.keys.start - 0.5, tile.keys.stop - 0.5
            axes.hlines(tile.m, *edges, color=ORANGE, lw=2.5, label=labels[1])
            if number and tile.alpha < 1:
                text = f"alpha = {tile.alpha:.3g}"
                axes.text(edges[0] + 0.2, tile.m, text, va="bottom", fontsize=9, color=ORANGE)
    axes.margins(y=0.15)
    axes.set_ylabel("S, m")
    draw_legend(axes, trace)
    draw_borders(axes, trace)


def draw_sums(axes: Axes, trace: Any) -> None:
    """l after each tile: the rescaled earlier sum, and the part that the tile adds."""
    before = 0.0
    for number, tile in enumerate(trace.tiles):
        kept, middle = before * tile.alpha, middle_of(tile)
        labels = ("alpha * l of before", "added by the tile") if number == 0 else (None, None)
        width = 0.6 * len(tile.keys)
        axes.bar(middle, kept, width=width, color=GREY, label=labels[0])
        axes.bar(middle, tile.l - kept, bottom=kept, width=width, color=BLUE, label=labels[1])
        axes.text(middle, tile.l, f"{tile.l:.3g}", ha="center", va="bottom", fontsize=9)
        before = tile.l
    axes.margins(y=0.25)
    axes.set_ylabel("l")
    draw_legend(axes, trace)
    draw_borders(axes, trace)


def draw_output(axes: Axes, trace: Any) -> None:
    """The components of O / l that change most, and their final values."""
    if trace.tiles:
        running = np.array([so_far(trace, tile) for tile in trace.tiles])  # (tiles, head_dim_v)
        shown = np.argsort(-np.ptp(running, 0))[:COMPONENTS]
        lines = axes.plot([middle_of(tile) for tile in trace.tiles], running[:, shown], "o-", color=BLUE, lw=1.2, ms=4)
        lines[0].set_label("O so far" if trace.divided else "O / l so far")
        end = np.full(len(shown), trace.tiles[-1].keys.stop - 0.5)
        axes.plot(end, trace.o[shown], "D", color=ORANGE, ms=6, label="o, as stored", clip_on=False)
    draw_legend(axes, trace)
    axes.set_ylabel("output")
    axes.set_xlabel("key; dashed: where a tile ends")
    draw_borders(axes, trace)


def so_far(trace: Any, tile: Any) -> np.ndarray:
    """The output if this tile was the last."""
    if trace.divided or not tile.l:
        return tile.O
    return tile.O / tile.l


def middle_of(tile: Any) -> float:
    return (tile.keys.start + tile.keys.stop - 1) / 2


def draw_legend(axes: Axes, trace: Any) -> None:
    if trace.tiles:  # a legend of nothing is warned about
        axes.legend(loc="best", fontsize=9)


def draw_borders(axes: Axes, trace: Any) -> None:
    for tile in trace.tiles[1:]:
        axes.axvline(tile.keys.start - 0.5, color=GREY, lw=0.8, ls="--")
