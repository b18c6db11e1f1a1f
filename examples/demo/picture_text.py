"""The scene in block characters, for the terminal."""

import numpy as np

from .scene import SENTENCE, TILE, Scene

SHADES = " ░▒▓█"
BARS = "▁▂▃▄▅▆▇█"


def text_picture(scene: Scene) -> list[str]:
    return [*heat_map(scene), "", *tile_table(scene)]


def heat_map(scene: Scene) -> list[str]:
    width = max(map(len, scene.tokens))
    count = len(scene.tokens)
    strongest = scene.weights.max()
    tiles = [f"tile {i + 1}" for i in range(len(scene.steps))]
    lines = [
        f"Layer {scene.layer + 1}, head {scene.head + 1} reads: {SENTENCE}",
        "Each row is a token that reads; the columns are the same tokens in the same order. Darker is more.",
        "",
        " " * (width + 3) + "".join(f"{name:<{2 * TILE + 1}}" for name in tiles),
    ]
    for row, token in enumerate(scene.tokens):
        cells = ""
        for begin in range(0, count, TILE):
            for weight in scene.weights[row, begin : begin + TILE]:
                # The root shows small weights that would be white.
                cells += 2 * SHADES[round(float(weight / strongest) ** 0.5 * (len(SHADES) - 1))]
            cells += "│"
        lines.append(f"{'>' if row == scene.row else ' '} {token:>{width}} {cells}")
    return lines


def tile_table(scene: Scene) -> list[str]:
    token = scene.tokens[scene.row]
    result = scene.steps[-1].o / scene.steps[-1].l
    shares = np.exp(scene.s - scene.s.max())
    lines = [
        f'The row of "{token}", in one pass over the keys, {TILE} at a time, as the kernels do it:',
        "m is the largest score s so far, l the sum of exp(s - m), o the sum of exp(s - m) * v. When",
        "m grows, alpha = exp(m_old - m) shrinks the l and o of before. At the end o / l is the result.",
        "",
        f"tile  {'keys':<28}  weights  {'m':>8}  {'alpha':>8}  {'l':>8}  |o/l - result|",
    ]
    for number, step in enumerate(scene.steps, 1):
        keys = " ".join(scene.tokens[step.begin : step.end])
        bars = "".join(BARS[round(float(share) * (len(BARS) - 1))] for share in shares[step.begin : step.end])
        distance = float(np.linalg.norm(step.o / step.l - result))
        state = f"{step.m:8.4f}  {step.alpha:8.4f}  {step.l:8.4f}  {distance:14.4f}"
        lines.append(f"{number:>4}  {keys:<28}  {bars:<7}  {state}")
    last = scene.steps[-1]
    lines += [
        "",
        f"{'ok' if scene.passed else 'FAIL'}: m + log(l) is {last.m + np.log(last.l):.5f}, the lse of "
        f"numba_flash.attention is {scene.lse:.5f};",
        f"o / l and its o differ by {np.abs(result - scene.o).max():.1e} at most.",
    ]
    return lines
