"""The scene as a PNG: the head's heat map, and one query's m, l and o while the tiles go by."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .scene import SENTENCE, TILE, Scene

BLUE, ORANGE, GREY = "#1f5fa8", "#d9772b", "#9a9a9a"
SHADES = BLUE, ORANGE, "#2e7d4f"  # of the components of o that are drawn; all of them would be a thicket


def save_picture(scene: Scene, path: str) -> None:
    # Figure without pyplot: no window system is asked for, and no global state is left behind.
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    figure.suptitle(
        f"“{SENTENCE}”   layer {scene.layer + 1}, head {scene.head + 1}\n"
        "Right: the framed row, computed as the kernels do. It never holds more scores than one tile, "
        "and still ends at exactly softmax(s) @ v.",
        fontsize=13,
    )
    grid = figure.add_gridspec(3, 2, width_ratios=(1.15, 1), height_ratios=(1.3, 1, 1))
    draw_weights(figure.add_subplot(grid[:, 0]), scene)
    draw_scores(figure.add_subplot(grid[0, 1]), scene)
    draw_l(figure.add_subplot(grid[1, 1]), scene)
    draw_o(figure.add_subplot(grid[2, 1]), scene)
    figure.savefig(path, dpi=110)


def draw_weights(axes: Axes, scene: Scene) -> None:
    count = len(scene.tokens)
    image = axes.imshow(scene.weights, cmap="Blues", vmin=0)
    axes.figure.colorbar(image, ax=axes, shrink=0.6, label="weight")
    axes.set_xticks(range(count), scene.tokens, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), scene.tokens)
    axes.set_xlabel("key: the token that is read")
    axes.set_ylabel("query: the token that reads")
    axes.set_title("What each token takes from each other one; a row sums to 1")
    axes.add_patch(Rectangle((-0.5, scene.row - 0.5), count, 1, fill=False, ec=ORANGE, lw=2))
    for key, weight in enumerate(scene.weights[scene.row]):
        shade = "white" if weight > scene.weights.max() / 2 else "black"
        axes.text(key, scene.row, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=shade)
    draw_borders(axes, scene)


def draw_scores(axes: Axes, scene: Scene) -> None:
    token = scene.tokens[scene.row]
    axes.set_title(f"“{token}” meets its keys {TILE} at a time; m is the largest score so far")
    axes.bar(range(len(scene.s)), scene.s, color=BLUE, width=0.7, label="score s")
    for number, step in enumerate(scene.steps):
        label = "m" if number == 0 else ""
        axes.hlines(step.m, step.begin - 0.5, step.end - 0.5, color=ORANGE, lw=2.5, label=label)
        if number and step.alpha < 1:
            text = f"m grows: the sums so far are multiplied\nby alpha = exp(m_old - m) = {step.alpha:.2f}"
            axes.text(step.begin - 0.4, step.m, text, va="bottom", fontsize=9, color=ORANGE, linespacing=1.4)
    axes.set_ylim(top=scene.s.max() + 0.4 * np.ptp(scene.s))
    axes.set_ylabel("s, m")
    axes.set_xticks(range(len(scene.tokens)), scene.tokens, rotation=45, ha="right", rotation_mode="anchor")
    axes.legend(loc="upper left", ncols=2, fontsize=9)
    align(axes, scene)


def draw_l(axes: Axes, scene: Scene) -> None:
    axes.set_title("l = alpha * l + sum(exp(s - m))")
    before = 0.0
    for number, (step, middle) in enumerate(zip(scene.steps, middles(scene), strict=True)):
        kept = before * step.alpha
        labels = ("alpha * l of before", "sum of this tile") if number == 0 else (None, None)
        axes.bar(middle, kept, width=1.6, color=GREY, label=labels[0])
        axes.bar(middle, step.l - kept, bottom=kept, width=1.6, color=BLUE, label=labels[1])
        axes.text(middle, step.l, f"{step.l:.2f}", ha="center", va="bottom", fontsize=9)
        before = step.l
    axes.set_ylim(0, 1.6 * max(step.l for step in scene.steps))
    axes.set_ylabel("l")
    axes.set_xticks([])
    axes.legend(loc="upper left", ncols=2, fontsize=9)
    align(axes, scene)


def draw_o(axes: Axes, scene: Scene) -> None:
    axes.set_title("o = alpha * o + exp(s - m) @ v; drawn: the numbers of o / l that move most")
    running = np.array([step.o / step.l for step in scene.steps])  # (tiles, head_dim)
    shown = np.argsort(-np.ptp(running, 0))[: len(SHADES)]
    end = len(scene.tokens) - 0.7
    for component, shade in zip(shown, SHADES, strict=True):
        axes.plot(middles(scene), running[:, component], "o-", color=shade, lw=1.2, ms=4, label=f"o[{component}] / l")
        axes.plot(end, scene.o[component], "D", color=shade, ms=7)
    axes.plot([], [], "D", color=GREY, ms=7, label="numba_flash.attention")
    axes.set_ylabel("o / l")
    axes.set_xticks(middles(scene), [f"after tile {i + 1}" for i in range(len(scene.steps))])
    axes.legend(loc="best", fontsize=9)
    align(axes, scene)


def middles(scene: Scene) -> list[float]:
    return [(step.begin + step.end - 1) / 2 for step in scene.steps]


def align(axes: Axes, scene: Scene) -> None:
    """The same key stands at the same place in all three panels."""
    axes.set_xlim(-0.5, len(scene.tokens) - 0.5)
    draw_borders(axes, scene)


def draw_borders(axes: Axes, scene: Scene) -> None:
    for step in scene.steps[1:]:
        axes.axvline(step.begin - 0.5, color=GREY, lw=0.8, ls="--")
