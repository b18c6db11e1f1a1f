"""The exercises: as given each fails with its hint, its solution passes, and mistakes are told where they are."""

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from numba_flash.machine import toolchain

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "exercises").glob("[0-9][0-9]_*.py"))
NUMBERS = [int(path.name[:2]) for path in FILES]
HUNTS = range(15, 21)
LONGEST = 45  # minutes


@pytest.fixture(scope="module")
def exercises():
    """(the module that runs them, the checks by number)"""
    sys.path.insert(0, str(ROOT / "exercises"))
    try:
        import _all
        import _run

        yield _run, _all.CHECKS
    finally:
        sys.path.remove(str(ROOT / "exercises"))


def test_each_says_what_it_teaches(exercises):
    run, checks = exercises
    assert NUMBERS == list(range(1, 22)) == list(checks) and run.HUNTS == HUNTS
    for number in NUMBERS:
        facts = run.about(run.path_of(number))
        solution = run.about(run.path_of(number, solution=True))
        told = dict(facts) if number not in HUNTS else facts | dict(Solution=solution["Solution"])
        assert told == solution and ("Solution" in facts) == (number not in HUNTS)  # whose bug is not given away
        assert (
            set(told) == {"title", "Teaches", "Minutes", "Read", "Solution"} and 5 <= int(facts["Minutes"]) <= LONGEST
        )
        for page in re.findall(r"(?:docs|numba_flash|examples)/[\w/]+\.\w+", f"{told['Read']} {told['Solution']}"):
            assert (ROOT / page).exists(), page
        (page,) = re.findall(r"docs/\w+\.md", facts["Read"])
        for heading in re.findall(r'"(.*)"', facts["Read"]):
            assert re.search(rf"^#+ {re.escape(heading)}$", (ROOT / page).read_text(), re.MULTILINE), heading


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_passes(exercises, number):
    run, checks = exercises
    assert run.result(run.path_of(number, solution=True), checks[number]) is None


@pytest.mark.parametrize("number", [number for number in NUMBERS if number not in HUNTS])
def test_as_given_its_holes_are_named(exercises, number):
    """And they are all that it lacks: its other lines are those of the solution."""
    run, checks = exercises
    said = run.result(run.path_of(number), checks[number])
    assert said.startswith("Put code in the place of each `...`:\n  line ")
    given, solved = (run.path_of(number, solution).read_text().splitlines() for solution in (False, True))
    other = [line for line in difflib.ndiff(given, solved) if line.startswith("- ")]
    assert other and all("..." in line for line in other), other
    assert len(said.splitlines()) - 1 == len(other)


# What the tool of each hunt says of the bug as it is given.
FOUND = {
    15: r"row 0: o is (.|\n)*     1    0.3292    0.9602    0.5320    3.7432    3.7432   -1.5655   -1.1659",
    16: r"It is right for 6 queries(.|\n)*causal means what .* says: FAILED, .*off by nan.*q .3, 1, 4, 7., k .3, 1, 3,",
    17: r"17_hunt_a_race.py:\d+: tile\[i, x\] = k(.|\n)*read by thread 7, is written over with no barrier(.|\n)*A race",
    18: r"p j, m, m_new\n.*\(1, np.float32\(0.960244\), np.float32\(0.960244\)\)(.|\n)*p alpha\n +1.0\n",
    19: r"19_hunt_a_copy_under_way.py:\d+: total \+= (.|\n)*is read before it arrived",
    20: r"Nobody can go on(.|\n)*threads 0: in mbarrier.wait, parity 0, on mbarrier V_EMPTY\[0\]",
}


@pytest.mark.parametrize("number", HUNTS)
def test_each_bug_is_found_by_the_tool_that_it_teaches(exercises, number):
    run, checks = exercises
    assert re.search(FOUND[number], run.result(run.path_of(number), checks[number]))


# number, a piece of the solution, what a student may write instead, what is said
MISTAKES = [
    (1, "m = max(m, x[row, i])", "m = 0.0", "OverflowError in thread 2 (.|\n)*which maximum is subtr"),
    (1, "m = max(m, x[row, i])", "m = x[row, i]", "OverflowError in thread 5 "),
    (
        1,
        "x[row, i] - m) / d",
        "x[row, i] - m)",
        r"row 0: the weights add up to ([\d.]+), and must .* 1: \1 is d\. What is",
    ),
    (
        1,
        "d += math.exp(x[row, i] - m)",
        "d += 2 * math.exp(x[row, i] - m)",
        "add up to 0.5, .*one factor. Is d their sum",
    ),
    (1, "d += math.exp(x[row, i] - m)", "d += x[row, j]", r"line 23: d \+= x\[row, j\]\nNameError in thread 0 .*'j'"),
    (
        1,
        "d += math.exp(x[row, i] - m)",
        "d += math.exp(x[row, i + 1] - m)",
        "in thread 0 of block 0: index 7 is out of",
    ),
    (
        2,
        "d = d * math.exp(m - x[row, i]) + 1",
        "d = d + 1",
        r"row 0, number \d: d is .*: m grew from .* = 0\.\d+, and the",
    ),
    (2, "d = d + math.exp(x[row, i] - m)", "d = d + 1", r"row 0, number 1: d is 2, must be 1\.\d+: m stays"),
    (1, "m = max(m, x[row, i])", "while True:\n                pass", "has not ended after 3 s: is there a loop"),
    (
        2,
        "i in range(1, x.shape[1]):",
        "_ in iter(int, 1):\n            i = 1",
        "has not ended after 3 s: is there a loop",
    ),
    (3, "a = math.exp(m_a - m) * l_a", "a = l_a", "a and b: l is .* Each part's l is measured from its own m"),
    (3, "o = (a * o_a + b * o_b) / l", "o = (o_a + o_b) / 2", "a and b: o is .* A part's output counts as much as"),
    (3, "o = (a * o_a + b * o_b) / l", "o = [o_a, o_b]", r"a and b: o has the shape \(2, 3\), and must have \(3,\)"),
    (3, "    return m, l, o\n", "", r"join must return \(m, l, o\), not None"),
    (
        4,
        "(k.shape[0] + TILE - 1) // TILE",
        "k.shape[0] // TILE",
        "8 queries, 10 keys .* ends with key 7, so tile 2 is miss",
    ),
    (4, "if row < q.shape[0]:", "if True:", "in thread 3 of block 1: index 11 is out of bounds"),
    (4, "if row < q.shape[0]:", "if row < 8:", "11 queries, .*: query 8 was not computed"),
    (4, "if key < k.shape[0]:\n                    s", "if True:\n                    s", "index 10 is out of bounds"),
    (
        5,
        "alpha = math.exp(m - m_new)",
        "alpha = 1.0",
        r"row 0, tile 0 .*: alpha is 1, must be 0: m grew from -inf to",
    ),
    (
        5,
        "alpha = math.exp(m - m_new)",
        "alpha = math.exp(m_new - m)",
        "OverflowError in thread 0|row 0, tile 0 .*: alpha is inf",
    ),
    (5, "l = alpha * l", "l = l + alpha", r"row 0, tile 1 \(keys 4 to 7\): l is .*times the sum of the tiles before"),
    (5, "acc[x] = alpha * acc[x]", "acc[x] = acc[x]", r"row 0, tile 1 \(keys 4 to 7\): acc is .*multiplied by alpha"),
    (
        5,
        "math.exp(s[y] - m_new)",
        "math.exp(s[y] - m)",
        r"row 0, tile 0 \(keys 0 to 3\): l is inf.*From which maximum is p measured",
    ),
    (5, "acc[x] / l", "acc[x]", "acc and l are right after the last tile, and o is wrong"),
    (6, "if m_new > -math.inf:", "if True:", r"row 0, tile 0 \(keys 0 to 3\): the row sees no key so far.*NaN"),
    (6, "if m_new > -math.inf:", "if m > -math.inf:", "It sees 1 of 8 keys: was a tile left out"),
    (6, "if l != 0 else 0", "if True else 0", "row 0: o is .*It sees no key, so l is 0"),
    (7, "// tile_n\n    end", "// tile_n + 1\n    end", "unmasked is 1, but query 0 sees 1 key: not all of tile 0"),
    (
        7,
        "(seen_by_last + tile_n - 1) // tile_n",
        "seen_by_last // tile_n",
        r"end is \d, but query \d+ sees \d+ keys: tile",
    ),
    (7, "max(0, first_row + rows + ahead)", "seqlen_k", "end is 2, but query 15 sees 16 keys: no one sees tile 1"),
    (7, "first_row + ahead + 1)", "first_row + ahead)", "unmasked is 3: tile 3 is seen whole by all queries"),
    (7, "max(0, first_row + ahead + 1)", "first_row + ahead + 1", r"is \(-2, 0\): a number of tiles cannot be below 0"),
    (7, "unmasked = seen_by_first // tile_n", "unmasked = 0", "unmasked is 0: tile 0 is seen whole by all queries"),
    (7, "    return unmasked, end", "    return end", r"\(unmasked, end\) has the shape \(\), and must have \(2,\)"),
    (8, "range(thread, ROWS * DIM, threads)", "range(ROWS * DIM)", r"k\[0, 0\] was read 16 times"),
    (
        8,
        "range(thread, ROWS * DIM, threads)",
        "range(2 * thread, 2 * thread + 2)",
        "threads 0 and 1 begin 2 elements apart",
    ),
    (
        8,
        "range(thread, ROWS * DIM, threads)",
        "range(thread, ROWS, threads)",
        r"tile\[2, 0\] is nan.*It was never written",
    ),
    (8, "column = index % DIM", "column = index // ROWS", "out of bounds|is written over|must be"),
    (
        9,
        "        cuda.syncthreads()\n        for x",
        "        pass\n        for x",
        "read by thread .* A race|is read with no barrier",
    ),
    (9, "        cuda.syncthreads()\n        for y", "        pass\n        for y", "A race: "),
    (9, "            pass", "            cuda.syncthreads()", "one of the 3 barriers protects nothing"),
    (9, "            pass", "            cuda.syncthreads", "only the function's name"),
    (
        9,
        "            pass",
        "            if row < 4:\n                cuda.syncthreads()",
        "A race|Nobody|protects nothing",
    ),
    (
        10,
        "lane // 4 + 8 * (i // 2)",
        "lane // 4 + 8 * (i % 2)",
        r"lane 0, element 1: \(row, column\) is \(8, 1\), must be \(0, 1\)",
    ),
    (
        10,
        "return 2 * (lane % 4) + i % 2",
        "2 * (lane % 4)",
        r"lane 0, element 0: .* is \(0, None\): is a `return` missing",
    ),
    (11, "bfly_f32(m, 2)", "bfly_f32(m, 4)", "lane 0 got .*, which is lane .*; row 0 lies in lanes 0 to 3"),
    (12, "piece ^ (row % 8)", "piece", "up to 8 of them in the same banks"),
    (12, "piece ^ (row % 8)", "piece | (row % 8)", "row 1: several pieces stand in place 1"),
    (13, "NEWEST = 1", "NEWEST = 2", "is read before it arrived"),
    (13, "NEWEST = 1", "NEWEST = 0", "nothing overlaps"),
    (13, "buffer = (j + 1) % 2", "buffer = j % 2", "copy to it is under way|before it arrived"),
    (
        13,
        "buffer = (j + 1) % 2",
        "buffer = j + 1",
        "16 bytes at shared address 0x420, but shared memory is 0x400 to 0x420",
    ),
    (14, "(turn + 1) % 2", "turn % 2", "Nobody can go on(.|\n)*EMPTY\\[0\\](.|\n)*A deadlock"),
    (
        14,
        "mbarrier.wait(full + 8 * stage, turn % 2)",
        "mbarrier.wait(full + 8 * stage, (turn + 1) % 2)",
        "phase of parity p has ended|of that parity has ended",
    ),
    (
        14,
        "mbarrier.wait(full + 8 * stage, turn % 2)",
        "mbarrier.wait(full + 8 * stage, 0)",
        "14_parity.py(.|\n)*no barrier in between\nmbarrier.wait goes on at once",
    ),
]


@pytest.mark.parametrize(("number", "text", "instead", "said"), MISTAKES)
def test_a_mistake_is_told(exercises, tmp_path, monkeypatch, number, text, instead, said):
    run, _ = exercises
    monkeypatch.setattr(run, "SECONDS", 3)
    found = told(exercises, tmp_path, number, (text, instead))
    assert found is not None and re.search(said, found), found
    assert str(tmp_path) not in found and len(found) < 1200


def told(exercises, folder, number, *edits):
    """What is said of the solution when pieces of it are others."""
    run, checks = exercises
    solution = run.path_of(number, solution=True)
    changed = solution.read_text()
    for text, instead in edits:
        assert changed.count(text) == 1, text
        changed = changed.replace(text, instead)
    path = folder / solution.name
    path.write_text(changed)
    return run.result(path, checks[number])


def test_a_barrier_after_each_score_is_more_than_two(exercises, tmp_path):
    edits = (
        ("cuda.syncthreads()\n        for x", "pass\n        for x"),
        ("            pass", "            cuda.syncthreads()"),
    )
    assert "the threads wait 9 times for each tile. Twice" in told(exercises, tmp_path, 9, *edits)


def test_a_larger_ring_hangs_too(exercises, tmp_path):
    edits = ("            mbarrier.arrive(v_empty + at)\n", ""), ("STAGES = 2", "STAGES = 8")
    assert "Nobody can go on" in told(exercises, tmp_path, 20, *edits)


# Of the blank page: a piece of the solution, what a student may write instead, what is said.
OWN_V2 = [
    ("acc[x] / l if l != 0", "acc[x] / l if l > 0", "One problem is right.*\n  NaN goes where it is seen.*: FAILED"),
    ("alpha = math.exp(m - m_new)", "alpha = 1.0", r"o is wrong first at \(0, 0, \d+, 0\); query 16 begins a tile"),
    ("m + math.log(l)", "m", r"lse is wrong first at \(0, 0, 0\)"),
    (
        "h // (heads // k.shape[1])",
        "h",
        "(?s)One problem is right.*query heads share the heads of K and V: RAISED.*IndexError",
    ),
    ("cuda.syncthreads()  # the tile is there", "pass", "thread 0 .*21_write_v2.py(?s:.*)A race"),
    (
        "q_row[x] * k_tile",
        "q[b, h, i, x] * k_tile",
        "All is right, but [\\d,]+ bytes are read, and Q, K and V have 6,400",
    ),
    ("    return o, lse", "    return o", r"attention must return \(o, lse\), not ndarray"),
]


@pytest.mark.parametrize(("text", "instead", "said"), OWN_V2)
def test_the_blank_page_is_read(exercises, tmp_path, text, instead, said):
    found = told(exercises, tmp_path, 21, (text, instead))
    assert found is not None and re.search(said, found), found


def test_a_script_that_is_no_python_and_one_that_does_not_load(exercises, tmp_path):
    run, checks = exercises
    path = tmp_path / "01_broken.py"
    path.write_text("def f(:\n")
    assert run.result(path, checks[1]).startswith("line 1 is no Python: ")
    path.write_text("import nothing_of_that_name\n")
    assert "No module named 'nothing_of_that_name'" in run.result(path, checks[1])
    path.write_text("")
    assert "softmax" in run.result(path, checks[1])


def test_the_script_answers_and_keeps_progress(exercises, tmp_path, monkeypatch):
    run, _ = exercises
    script = [sys.executable, str(ROOT / "scripts" / "exercise")]
    done = subprocess.run([*script, "1", "--solution"], capture_output=True, text=True)
    assert done.returncode == 0 and "\nok (" in done.stdout, done.stdout + done.stderr
    failed = subprocess.run([*script, "17"], capture_output=True, text=True)
    assert failed.returncode == 1 and "\nnot yet (" in failed.stdout and "Read: docs/" in failed.stdout, failed.stderr
    stopped = subprocess.run(
        [*script, "18", "--stop", "alpha = math", "--thread", "2"], input="p row\nq\n", capture_output=True, text=True
    )
    assert "(Pdb) 2\n" in stopped.stdout and stopped.returncode == 0, stopped.stdout + stopped.stderr
    monkeypatch.setattr(run, "PROGRESS", tmp_path / "progress.json")
    assert "0 of 21 are solved" in run.overview()
    run.keep(3)
    run.keep(1)
    assert list(run.solved()) == [1, 3] and "2 of 21 are solved" in run.overview()
    assert re.search(r"^ +3  solved   Join", run.overview(), re.MULTILINE)


def test_the_page_names_the_exercises_and_shows_what_the_script_says(exercises, tmp_path):
    run, checks = exercises
    page = (ROOT / "docs" / "exercises.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+) \| (\d+) \| `exercises/(.+)` \|$", page, re.MULTILINE)
    facts = [run.about(path) for path in FILES]
    assert rows == [(str(n), x["title"], x["Minutes"], p.name) for n, x, p in zip(NUMBERS, facts, FILES, strict=True)]
    path = tmp_path / "05_alpha.py"
    path.write_text(run.path_of(5, solution=True).read_text().replace("acc[x] = alpha * acc[x]", "acc[x] = acc[x]"))
    assert run.result(path, checks[5]) in page
    (minutes,) = re.findall(r"\(exercises.md\), (\d+) minutes", (ROOT / "docs" / "index.md").read_text())
    assert int(minutes) == sum(int(x["Minutes"]) for x in facts)
    questions = page.count("<summary>")
    assert questions == page.count("</details>") >= 20 and page.count("## Quiz: ") == 5


def test_the_notebook_runs_in_a_folder_of_its_own(tmp_path, exercises):
    """Its cells up to the fifth exercise, as given; then the solution of that one."""
    nbformat, nbclient = (pytest.importorskip(name, reason=f"needs {name}") for name in ("nbformat", "nbclient"))
    pytest.importorskip("ipykernel", reason="needs ipykernel")
    run, _ = exercises
    script, path = ROOT / "scripts" / "exercises_notebook", tmp_path / "exercises.ipynb"
    subprocess.run([sys.executable, str(script), str(path)], check=True, capture_output=True)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    written = [cell.source for cell in notebook.cells if cell.source.startswith("%%writefile")]
    assert len(written) == len(NUMBERS)
    fifth = notebook.cells.index(next(cell for cell in notebook.cells if cell.source == "exercise(5)"))
    del notebook.cells[fifth + 1 :]
    name, _, _ = notebook.cells[fifth - 1].source.partition("\n")
    solved = nbformat.v4.new_code_cell(f"{name}\n{run.path_of(5, solution=True).read_text()}")
    stops = nbformat.v4.new_code_cell("import numba_flash; print(numba_flash.__file__); exercise(5); exercise()")
    notebook.cells += [solved, stops]
    outside = {name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "NUMBA_ENABLE_CUDASIM")}
    nbclient.NotebookClient(notebook, timeout=120, resources=dict(metadata=dict(path=str(tmp_path)))).execute(
        env=outside
    )
    said = ["".join(output.get("text", "") for output in cell.get("outputs", ())) for cell in notebook.cells]
    assert "Put code in the place of each `...`" in said[fifth] and "not yet" in said[fifth]
    assert said[-1].startswith(str(tmp_path)) and "\nok (" in said[-1] and "1 of 21 are solved" in said[-1]


def test_they_need_nothing_that_a_browser_has_not(tmp_path):
    """No thread, no process, no numba-cuda, no ml_dtypes."""
    text = f"""
import os, sys, threading
os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
for name in ("ml_dtypes", "numba_cuda", "cuda", "fcntl", "mmap", "_posixsubprocess", "_multiprocessing"):
    sys.modules[name] = None
threading.Thread.start = None
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "exercises")!r}]
import _run
from _all import CHECKS
print([_run.result(_run.path_of(number, solution=True), CHECKS[number]) for number in _run.numbers()])
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{[None] * len(NUMBERS)}\n", done.stderr
