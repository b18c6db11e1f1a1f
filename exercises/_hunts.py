"""The checks of the bug hunts, 15 to 20, and of 21. Each shows what its tool says, and not where the bug is."""

import contextlib
import io
import re

import numpy as np
from _checks import launched
from _truth import attention, problem, run, tiles
from _wrong import as_array, close, expect, first_wrong

import numba_flash
from numba_flash.debug import race_check, stop_at, traffic, watch
from numba_flash.testing import check_kernel


def check_missing_line(module):
    """The trace of the first row that is wrong."""
    q, k, v = problem(6, 12)
    o = np.empty_like(q)
    with watch(module.attention) as seen:
        launched(module.attention, o, q, k, v, threads=len(q))
    wrong = first_wrong(o, attention(q, k, v))
    if wrong is None:
        return
    row = wrong[0]
    right = tiles(q, k, v, module.TILE)
    table = [f"row {row}: o is {o[row]}, must be {attention(q, k, v)[row]}. What watch saw of this row:"]
    table.append(
        f"{'tile':>6}  {'m':>8}  {'m_new':>8}  {'alpha':>8}  {'l':>8}  {'must be':>8}  {'acc[0]':>8}  {'must be':>8}"
    )
    for one in seen:
        of, j, m, m_new, alpha, l, acc = one.values.values()
        if of == row:
            numbers = (m, m_new, alpha, l, right[row, j][3], acc[0], right[row, j][4][0])
            table.append(f"{j:>6}  " + "  ".join(f"{float(x):>8.4f}" for x in numbers))
    table.append("Which column leaves what it must be, at which tile? And what happened to alpha in that tile?")
    expect(False, "\n".join(table))


def promises_broken(function, **limits):
    """check_kernel's lines that do not hold."""
    limits |= dict(layouts=("bhsd",), features=("causal",), strange_strides=False, quick=True)
    with race_check(), contextlib.redirect_stdout(io.StringIO()):
        report = check_kernel(function, **limits)
    broken = []
    for one in report.lines:
        if one.outcome not in ("held", "not tried"):
            shapes = ", ".join(f"{name} ({shape})" for name, shape in re.findall(r"([qkv])=\w+\[([\d, ]+)\]", one.note))
            broken.append(f"  {one.promise}: {one.outcome}, {re.split(',? in Case', one.note)[0]}, with {shapes}")
    return broken


def check_promises(module):
    q, k, v = problem(6, 6)
    with race_check():
        own = [module.attention(*(x[None, None] for x in (q, k, v)), causal=causal)[0, 0] for causal in (False, True)]
    right = [attention(q / q.shape[1] ** 0.5, k, v, causal) for causal in (False, True)]
    own_problem = "It is right" if close(own, right).all() else "It is wrong"
    broken = promises_broken(module.attention, grouped=False)
    about = f"{own_problem} for 6 queries and 6 keys, causal or not. What check_kernel(quick=True) says of it:"
    which = (
        "There are more queries than keys, so how many keys does the first query see? Follow it through the first tile."
    )
    expect(not broken, "\n".join([about, *broken, which]))


def check_race(module):
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((24, module.DIM)).astype(np.float32), rng.standard_normal(24).astype(np.float32)
    out = launched(module.means, np.empty(module.TILE, np.float32), k, v)
    like = k[: module.TILE].astype(np.float64) @ k.T > 0
    right = (like * v).sum(1) / like.sum(1)
    wrong = first_wrong(out, right)
    expect(wrong is None, f"out{list(wrong or ())} is {out}, must be {right}.")


def check_correction(module):
    """What pdb prints in the thread of the first wrong row, in the tile in which its maximum grows."""
    q, k, v = problem(6, 12)
    o = launched(module.attention, np.empty_like(q), q, k, v, threads=len(q))
    wrong = first_wrong(o, attention(q, k, v))
    if wrong is None:
        return
    row, session = wrong[0], io.StringIO()
    found = tiles(q, k, v, module.TILE)
    tile = next(j for j in (1, 2) if found[row, j][0] < found[row, j][1])
    typed = ["c"] * tile + ["p j, m, m_new", "n", "p alpha"]
    with contextlib.redirect_stdout(session), stop_at(module.attention, "alpha = math.exp", thread=row, commands=typed):
        launched(module.attention, o, q, k, v, threads=len(q))
    answers = [line for line in session.getvalue().splitlines() if line and not line.startswith((">", "->"))]
    before, after, alpha, *_ = found[row, tile]
    expect(
        False,
        "\n".join(
            [
                f"row {row} is wrong. pdb in its thread, at tile {tile}:",
                *(f"  {line}" for line in answers),
                f"In this tile the maximum grows from {before:.4g} to {after:.4g}, so alpha must be {alpha:.4g}. Which",
                "of the three numbers is not what its name says? Look at the lines before alpha's.",
            ]
        ),
    )


def check_arrival(module):
    x = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)
    out = np.full(24, np.nan, np.float32)
    run(module.reversed_rows, 8, x, out, scalars=(3,))
    right = x.astype(np.float64).sum(axis=1).reshape(3, 8)[:, ::-1].ravel()
    wrong = first_wrong(out, right)
    expect(wrong is None, f"row {(wrong or (0,))[0]}: the sum is {out[wrong or 0]}, must be {right[wrong or 0]}.")


def check_release(module):
    tiles = 4 * module.STAGES  # however large somebody makes the ring
    k, v = np.arange(1, tiles + 1, dtype=np.float32), np.ones(tiles, np.float32)
    out = launched(module.weighted, np.empty(1, np.float32), k, v, threads=2)
    expect(close(out[0], k.sum()), f"The sum is {out[0]}, must be {k.sum()}.")


MEANING = "docs/testing_your_kernel.md has the usual cause of each line."


def check_v2(module):
    """One problem with its first wrong row, the contract's promises, and how often K and V are read."""
    q, k, v = (x[None, None] for x in problem(20, 40, dim=16, size=0.25))
    with race_check():
        made = module.attention(q, k, v, causal=True)
    expect(isinstance(made, tuple) and len(made) == 2, f"attention must return (o, lse), not {type(made).__name__}")
    right = numba_flash.attention(q, k, v, causal=True, return_lse=True, kernel="reference")
    for name, got, wanted in zip(("o", "lse"), made, right, strict=True):
        wrong = first_wrong(as_array(name, got, wanted.shape), wanted)
        expect(wrong is None, f"20 queries, 40 keys, causal: {name} is wrong first at {wrong}; query 16 begins a tile.")
    broken = promises_broken(module.attention)
    expect(not broken, "\n".join(["One problem is right. check_kernel(quick=True) says:", *broken, MEANING]))
    seen = traffic(q, k, v, kernel=module.attention)
    all_once = q.nbytes + k.nbytes + v.nbytes
    note = "A row of Q belongs into registers, a tile of K and V into shared memory, once for all queries of a block."
    said = f"All is right, but {seen.global_read:,} bytes are read, and Q, K and V have {all_once:,}. {note}"
    expect(seen.global_read <= 4 * all_once, said)
