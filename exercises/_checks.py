"""The checks of exercises 1 to 14. Each says which row and tile is wrong, and by which step."""

import ast
import inspect
import math

import numpy as np
from _truth import attention, problem, run, softmax, tiles
from _wrong import as_array, close, expect, first_wrong

from numba_flash.debug import race_check, watch
from numba_flash.ptx import fragments
from numba_flash.ptx.sim import now

THREADS = 8


def launched(kernel, out, *operands, blocks=1, threads=THREADS):
    """`out`, filled with NaN, after a launch with the simulator's checks."""
    out[...] = np.nan
    with race_check():
        kernel[blocks, threads](*operands, out)
    return out


def softmax_rows():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 7)).astype(np.float32)
    x[2] += 1000
    x[3] = x[3, 0]
    x[4] -= 1000
    x[5, 2] += 1000  # the last number is far from the largest
    return x


def check_softmax(module):
    x = softmax_rows()
    y = launched(module.softmax, np.empty_like(x), x)
    right = softmax(x.astype(np.float64))
    row = next((row for row in range(len(x)) if first_wrong(y[row], right[row])), None)
    if row is None:
        return
    got, total = y[row], float(np.sum(y[row]))
    d = float(np.exp(x[row] - x[row].max().astype(np.float64)).sum())
    sums = f"row {row}: the weights add up to {total:.4g}, and must add up to 1"
    expect(not close(total, d), f"{sums}: {d:.4g} is d. What is divided by it?")
    expect(not close(got, total * right[row]).all(), f"{sums}: all are wrong by one factor. Is d their sum?")
    expect(close(total, 1), f"{sums}.")
    i = first_wrong(got, right[row])[0]
    expect(
        False, f"row {row}, number {i} (x = {x[row, i]:.4g}): the weight is {got[i]:.4g}, must be {right[row, i]:.4g}."
    )


def check_online(module):
    x = softmax_rows()
    y = np.empty_like(x)
    with watch(module.softmax) as seen:
        launched(module.softmax, y, x)
    for row, i, m, d in (one.values.values() for one in seen):
        part = x[row, : i + 1].astype(np.float64)
        right, old = np.exp(part - part.max()).sum(), part[:-1].max()
        if not close(d, right):
            grew = f"m grew from {old:.4g} to {m:.4g}, so the sum so far must be multiplied by e^({old:.4g} - {m:.4g})"
            stays = f"m stays {m:.4g}, so e^({part[-1]:.4g} - m) is added"
            why = f"{grew} = {math.exp(old - m):.4g}, and the new number adds e^0 = 1" if part[-1] > old else stays
            expect(False, f"row {row}, number {i}: d is {d:.4g}, must be {right:.4g}: {why}.")
    expect(first_wrong(y, softmax(x.astype(np.float64))) is None, "The sums are right and the weights are wrong.")


def check_join(module):
    rng = np.random.default_rng(0)
    nothing = -math.inf, 0.0, np.zeros(3)

    def part(scores):
        values = rng.standard_normal((len(scores), 3))
        m = scores.max()
        p = np.exp(scores - m)
        return (m, p.sum(), p @ values / p.sum()), scores, values

    a, s_a, v_a = part(rng.standard_normal(3))
    b, s_b, v_b = part(rng.standard_normal(5) + 2)
    s, v = np.concatenate([s_a, s_b]), np.concatenate([v_a, v_b])
    p = np.exp(s - s.max())
    whole = s.max(), p.sum(), p @ v / p.sum()
    cases = (
        ("a and b", a, b, whole),
        ("b and a", b, a, whole),
        ("a and a part without keys", a, nothing, a),
        ("a part without keys and b", nothing, b, b),
        ("two parts without keys", nothing, nothing, nothing),
    )
    for what, one, other, right in cases:
        with np.errstate(all="ignore"):
            made = module.join(*one, *other)
        expect(isinstance(made, tuple) and len(made) == 3, f"join must return (m, l, o), not {made!r}")
        for name, got, wanted in zip("mlo", made, right, strict=True):
            got = as_array(f"{what}: {name}", got, np.shape(wanted))
            hint = " Each part's l is measured from its own m." if name == "l" else ""
            hint = " A part's output counts as much as its weight, and the result is divided." if name == "o" else hint
            expect(close(got, wanted).all(), f"{what}: {name} is {got}, must be {np.asarray(wanted)}.{hint}")


def check_ends(module):
    for queries, keys in ((8, 8), (8, 10), (11, 8), (5, 3)):
        q, k, v = problem(queries, keys)
        what = f"{queries} queries, {keys} keys in tiles of {module.TILE}"
        o = launched(module.attention, np.empty_like(q), q, k, v, blocks=-(-queries // THREADS))
        wrong = first_wrong(o, attention(q, k, v))
        if wrong is None:
            continue
        row = wrong[0]
        expect(not np.isnan(o[row]).all(), f"{what}: query {row} was not computed. Which threads have a query?")
        for fewer in range(keys - 1, 0, -1):
            if close(o[row], attention(q, k[:fewer], v[:fewer])[row]).all():
                tile = fewer // module.TILE
                expect(False, f"{what}: query {row} ends with key {fewer - 1}, so tile {tile} is missing. Round up.")
        expect(False, f"{what}: query {row} is {o[row]}, must be {attention(q, k, v)[row]}.")


def check_tiles(kernel, q, k, v, tile, causal=False):
    """Compares the variables of each row after each tile, from the kernel's `# watch:` comment; then o."""
    o, right = np.empty_like(q), tiles(q, k, v, tile, causal)
    with watch(kernel) as seen:
        launched(kernel, o, q, k, v, threads=len(q))
    for one in seen:
        row, j, _, m, alpha, l, acc = one.values.values()
        at = f"row {row}, tile {j} (keys {j * tile} to {j * tile + tile - 1})"
        if (row, j) not in right:
            expect(False, f"{at}: the row sees no key so far, so m_new is -inf, and -inf - -inf is NaN (line 12).")
        before, m_right, *rest = right[row, j]
        grew = f"m grew from {before:.4g} to {m_right:.4g}" if m_right > before else f"m stays {m_right:.4g}"
        expect(close(m, m_right), f"{at}: m_new is {m:.4g}, must be {m_right:.4g}.")
        why = {
            "alpha": f"{grew}, and alpha turns e^(s - m) into e^(s - m_new).",
            "l": f"{grew}; l is alpha = {rest[0]:.4g} times the sum of the tiles before, plus this one's.",
            "acc": f"{grew}; the output of the tiles before is multiplied by alpha = {rest[0]:.4g}, as l is.",
        }
        if before == -math.inf:
            why["l"] = "nothing was before this tile, so l is the sum of its weights p."
            why["acc"] = "nothing was before this tile, so acc is the sum of its p * v, not divided yet."
            if l == math.inf:
                why["l"] = "m was -inf before this tile, and e^(s - -inf) is inf. From which maximum is p measured?"
        for name, got, wanted in zip(("alpha", "l", "acc"), (alpha, l, acc), rest, strict=True):
            shown, must = (np.array2string(np.asarray(x, np.float64), precision=4).strip(".") for x in (got, wanted))
            expect(close(got, wanted).all(), f"{at}: {name} is {shown}, must be {must}: {why[name]}")
    return o


def check_alpha(module):
    q, k, v = problem(6, 12)
    o = check_tiles(module.attention, q, k, v, module.TILE)
    wrong = first_wrong(o, attention(q, k, v))
    expect(wrong is None, f"acc and l are right after the last tile, and o is wrong at {wrong}: what divides acc?")


def check_nothing(module):
    q, k, v = problem(11, 8)
    o = check_tiles(module.attention, q, k, v, module.TILE, causal=True)
    right = attention(q, k, v, causal=True)
    wrong = first_wrong(o, right)
    if wrong is not None:
        row = wrong[0]
        keys = max(0, row + 1 + len(k) - len(q))
        why = f"It sees {keys} of {len(k)} keys: was a tile left out?"
        why = why if keys else "It sees no key, so l is 0: its output is 0, and 0 / 0 is NaN."
        expect(False, f"row {row}: o is {o[row]}, must be {right[row]}. {why}")


def check_key_tiles(module):
    for seqlen_q, seqlen_k, rows, n in (
        (32, 32, 16, 16),
        (40, 40, 16, 16),
        (40, 24, 16, 8),
        (5, 33, 16, 16),
        (9, 30, 4, 8),
        (9, 40, 4, 8),
    ):
        for first in range(0, seqlen_q, rows):
            own = range(first, min(first + rows, seqlen_q))
            sees = np.arange(seqlen_k) <= np.array(own)[:, None] + seqlen_k - seqlen_q
            cut = [sees[:, at : at + n] for at in range(0, seqlen_k, n)]
            end = sum(1 for tile in cut if tile.any())
            unmasked = sum(1 for tile in cut if tile.all() and tile.shape[1] == n)
            at = f"queries {own[0]} to {own[-1]} of {seqlen_q}, {seqlen_k} keys in tiles of {n}"
            made = module.key_tiles(first, len(own), seqlen_q, seqlen_k, n)
            got = as_array(f"{at}: (unmasked, end)", made, (2,))
            last, first_sees = (f"{n} key{'s' * (n != 1)}" for n in (int(sees[-1].sum()), int(sees[0].sum())))
            least = "a number of tiles cannot be below 0. A query that is ahead of all keys sees 0 of them."
            expect(min(got) >= 0, f"{at}: (unmasked, end) is {made}: {least}")
            expect(
                got[1] >= end,
                f"{at}: end is {got[1]:g}, but query {own[-1]} sees {last}: tile {end - 1} is needed.",
            )
            expect(got[1] <= end, f"{at}: end is {got[1]:g}, but query {own[-1]} sees {last}: no one sees tile {end}.")
            expect(
                got[0] <= unmasked,
                f"{at}: unmasked is {got[0]:g}, but query {own[0]} sees {first_sees}: not all of tile {unmasked}.",
            )
            # A last tile that is not full may be masked or not: its missing keys are cut off elsewhere.
            expect(
                got[0] >= unmasked, f"{at}: unmasked is {got[0]:g}: tile {int(got[0])} is seen whole by all queries."
            )


class Counted:
    """An array in global memory that notes which thread read what."""

    def __init__(self, array):
        self.array, self.shape, self.reads = array, array.shape, []

    def __getitem__(self, index):
        self.reads.append((now.thread.thread_id, tuple(int(i) for i in index)))
        return self.array[index]


def check_load(module):
    rows, dim = module.ROWS, module.DIM
    for first in (0, 6):
        k = np.random.default_rng(0).standard_normal((rows + 2, dim)).astype(np.float32)
        counted = Counted(k)
        tile = launched(module.load, np.empty((rows, dim), np.float32), counted, first, threads=16)
        right = np.zeros((rows, dim))
        right[: len(k) - first] = k[first : first + rows]
        wrong = first_wrong(tile, right)
        if wrong is not None:
            never = " It was never written: shared memory is NaN until it is." if np.isnan(tile[wrong]) else ""
            expect(
                False, f"first_row {first}: tile{list(wrong)} is {tile[wrong]:.4g}, must be {right[wrong]:.4g}.{never}"
            )
        places = [at for _, at in counted.reads]
        twice = next((at for at in places if places.count(at) > 1), None)
        count = places.count(twice)
        expect(
            twice is None, f"k{list(twice or ())} was read {count} times. Each thread loads its own share of the tile."
        )
        starts = {}
        for thread, (row, column) in counted.reads:
            starts.setdefault(thread, (row - first) * dim + column)
        apart = starts.get(1, 1) - starts[0]
        expect(
            apart == 1, f"threads 0 and 1 begin {apart} elements apart: neighbours must read neighbours (coalesced)."
        )


def check_barriers(module):
    tree = ast.parse(inspect.getsource(module))
    lines = [ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Expr)]
    expect("cuda.syncthreads" not in lines, "cuda.syncthreads is only the function's name: with () it is called.")
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((n, module.DIM)).astype(np.float32) for n in (module.TILE, 3 * module.TILE))
    s = launched(module.scores, np.empty((len(q), len(k)), np.float32), q, k)
    wrong = first_wrong(s, q.astype(np.float64) @ k.T)
    expect(wrong is None, f"s{list(wrong or ())} is wrong.")
    count = lines.count("cuda.syncthreads()")
    expect(count <= 2, f"No race is left, and one of the {count} barriers protects nothing: which data does it guard?")
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and ast.unparse(n.target) == "y"]
    often = any("cuda.syncthreads()" in ast.unparse(loop) for loop in loops)
    expect(not often, f"No race is left, and the threads wait {module.TILE + 1} times for each tile. Twice is enough.")


def check_fragments(module):
    for lane in range(32):
        for i in range(4):
            got = as_array(
                f"lane {lane}, element {i}: (row, column)", (module.row_of(lane, i), module.column_of(lane, i)), (2,)
            )
            right = fragments.c_element(lane, i)
            who = f"lane {lane} is number {lane % 4} of its four neighbours, and its four are number {lane // 4}"
            shown = tuple(int(x) if x == int(x) else float(x) for x in got)
            expect(shown == right, f"lane {lane}, element {i}: (row, column) is {shown}, must be {right}; {who}.")


def check_maximum(module):
    x = np.random.default_rng(1).permutation(32).astype(np.float32)
    out = launched(module.row_maximum, np.empty_like(x), x, threads=32)
    for lane in range(32):
        four = x[lane // 4 * 4 :][:4]
        asked = [other for other in range(32) if x[other] == out[lane]]
        row = f"row {lane // 4} lies in lanes {lane // 4 * 4} to {lane // 4 * 4 + 3} and has the maximum {four.max():g}"
        expect(out[lane] == four.max(), f"lane {lane} got {out[lane]:g}, which is lane {asked[0]}'s; {row}.")


def check_swizzle(module):
    made = np.array([[as_array(f"place({r}, {p})", module.place(r, p), ()) for p in range(8)] for r in range(16)])
    for row, places in enumerate(made):
        expect(
            ((places >= 0) & (places < 8) & (places % 1 == 0)).all(), f"row {row}: places must be 0 to 7, not {places}"
        )
        twice = next((int(p) for p in places if (places == p).sum() > 1), None)
        expect(twice is None, f"row {row}: several pieces stand in place {twice}.")
    for first in (0, 8):
        for piece in range(8):
            places = made[first : first + 8, piece]
            banks = 4 * int(places[0])
            most = max((places == one).sum() for one in places)
            which = f"piece {piece} of rows {first} to {first + 7} stands in the places {places.astype(int).tolist()}"
            expect(
                most == 1,
                f"{which}: up to {most} of them in the same banks, such as {banks}, one read after the other.",
            )


def check_copies(module):
    x = np.arange(20, dtype=np.float32)
    out = np.full(5, np.nan, np.float32)
    run(module.sums, 1, x, out, scalars=(5,))
    right = x.reshape(5, 4).sum(axis=1)
    wrong = first_wrong(out, right)
    expect(wrong is None, f"tile {(wrong or (0,))[0]} is the first wrong one: out is {out}, must be {right}.")
    newest = module.NEWEST
    late = "It is right, and nothing overlaps: the next copy was just started, and wait_group(0) waits for it, too."
    expect(newest != 0, late)


def check_parity(module):
    x = np.arange(1, 8, dtype=np.float32)
    out = launched(module.hand_over, np.empty_like(x), x, threads=2)
    wrong = first_wrong(out, 2.0 * x)
    n = (wrong or (0,))[0]
    expect(wrong is None, f"tile {n}: the consumer stored {out[n]:g}, must be {2 * x[n]:g}.")
