"""The sessions that README and docs/stepping.md show happen as they are shown, and the stops that they name exist."""

import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.instructions import compiled

from numba_flash import debug

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "stepping.md", ROOT / "docs" / "algorithm.md"]
SESSION = re.compile(r"^\$ \S*python scripts/step (\w+) \"(.*?)\" (.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# | `kernel` | `line` | thread | ...
STOP = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (\d+) \|", re.MULTILINE)
STOPS = STOP.findall((ROOT / "docs" / "stepping.md").read_text())
# Those of other pages: scripts/step kernel "line" --thread thread
COMMAND = re.compile(r"^\S*python scripts/step (\w+) \"(.*?)\" --thread (\d+)", re.MULTILINE)
STOPS += [stop for page in sorted((ROOT / "docs").glob("*.md")) for stop in COMMAND.findall(page.read_text())]


def places(text):
    """Where a session stops: (file and line, the line's code), and the code alone where no place is shown."""
    return re.findall(r"^> (?:.*/)?(\w+\.py\(\d+\))|^-> (.*)$", text.replace("(Pdb) ", ""), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_session_is_what_happens(page):
    kernel, line, options, session = SESSION.search(page.read_text()).groups()
    typed = "\n".join([*re.findall(r"^\(Pdb\) (.*)$", session, re.MULTILINE), "q", ""])
    command = [sys.executable, str(ROOT / "scripts" / "step"), kernel, line, *options.split()]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=120)
    shown, happened = places(session), places(done.stdout)
    if not any(place for place, _ in shown):
        happened = [(place, code) for place, code in happened if code]
    assert shown and happened[: len(shown)] == shown, done.stdout + done.stderr
    numbers = re.findall(r"-?\d\.\d{5,}", session)
    assert numbers and [number for number in numbers if number not in done.stdout] == [], done.stdout


@pytest.mark.parametrize(("kernel", "line", "thread"), STOPS, ids=lambda value: str(value))
def test_the_stops_of_the_page_are_one_line_each(kernel, line, thread):
    with pytest.warns(RuntimeWarning, match="did not stop"), debug.stop_at(kernel, line, int(thread)):
        pass


def test_the_pages_name_stops():
    kernels = [kernel for kernel, _, _ in STOPS]
    assert {"v1", "mma", "wgmma"} <= set(kernels) and kernels.count("wgmma") == kernels.count("mma") == 2


def without_who(text):
    """Which thread comes first differs from run to run."""
    return re.sub(r"thread \d+( \(warp \d+, lane \d+\))?|0x[0-9a-f]+", "_", text)


def test_the_race_of_readme_is_what_happens(monkeypatch, capsys):
    """Without the barrier that README deletes, scripts/step prints what README shows."""
    page = (ROOT / "README.md").read_text()
    barrier, file = re.search(r"delete the\sbarrier `(.*?)`\sin `numba_flash/(\S+)`", page).groups()
    kernel, shown = re.search(r"^\$ \S*python scripts/step (\w+)\n(.*?)^(?:\$|```$)", page, re.M | re.S).groups()
    text, module = (
        (ROOT / "numba_flash" / file).read_text(),
        importlib.import_module(f"numba_flash.kernels.{kernel}.forward"),
    )
    assert kernel == Path(file).parent.name and text.count(barrier) == 1
    broken = "".join(line for line in text.splitlines(keepends=True) if barrier not in line)
    names = dict(module.__dict__)
    compiled(broken, names, module.__file__)
    monkeypatch.setattr(module, "make", names["make"])
    monkeypatch.setattr(sys, "argv", ["step", kernel])
    monkeypatch.syspath_prepend(ROOT / "scripts")
    assert runpy.run_path(str(ROOT / "scripts" / "step"))["main"]() == 1
    said = capsys.readouterr().out.replace(f"{ROOT}/", "")
    for line in shown.splitlines():
        assert without_who(line.removesuffix(" ...")) in without_who(said), said


def test_pdb_stops_where_the_page_says(tmp_path):
    """A program of one's own, under python -m pdb, started in the clone."""
    page = (ROOT / "docs" / "stepping.md").read_text()
    place = " ".join(re.search(r"`(b\s+numba_flash/\S+:\d+,\s+.*?)`", page)[1].split())
    program = tmp_path / "mine.py"
    program.write_text(
        "import numpy as np, numba_flash\n"
        "q = np.ones((1, 1, 24, 4), np.float32)\n"
        "numba_flash.attention(q, q, q, causal=True, kernel='v2')\n"
    )
    command, typed = [sys.executable, "-m", "pdb", str(program)], f"{place}\nc\np j\nq\n"
    assert "`PYTHONPATH=. python -m pdb`" in page
    env = os.environ | dict(PYTHONPATH=".")
    done = subprocess.run(command, input=typed, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert "\n-> alpha = math.exp(m - m_new)\n(Pdb) 0\n" in done.stdout, done.stdout + done.stderr


def test_the_trace_is_what_happens():
    """The problem of scripts/step, which the page's first session is about."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 24, 4), dtype=np.float32) for _ in range(3))
    shown = re.search(r"^```text\n(kernel 'v2': .*?)^```$", (ROOT / "docs" / "stepping.md").read_text(), re.M | re.S)[1]
    assert repr(debug.trace(q, k, v, causal=True, row=22)).startswith(shown)


def test_the_worked_example_has_the_same_numbers_everywhere():
    """In the table, in the sentences below it, in the trace, and by equation 1. The drawing has the same problem."""
    page = (ROOT / "docs" / "algorithm.md").read_text()
    table = page.partition("<!-- worked example -->")[2].partition("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in table.splitlines()[3:]]
    seen = debug.trace(**debug.worked_example(), row=0)
    values = debug.worked_example()["v"].ravel()
    for at, tile in enumerate(seen.tiles):
        sees = np.isfinite(tile.S)
        s, p, v = tile.S[sees], tile.P[sees], values[tile.keys.start : tile.keys.stop][sees]
        expected = [s, v, tile.m, tile.alpha, p, p.sum(), tile.l, p @ v, tile.O[0]]
        shown = [[float(x) for x in line[at].split(",")] for line in lines if line[at]]
        assert len(shown) == len(expected)
        for one, other in zip(shown, expected, strict=True):
            np.testing.assert_allclose(one, np.atleast_1d(other), atol=5.1e-5)
    s, v = np.array([1.0, 2, 4, 3]), np.array([1.0, 2, 3, 4])
    assert f"{np.exp(s) @ v / np.exp(s).sum():.4f}, and that is what equation 1 gives" in page
    assert f"4 + log 1.5530 = {np.log(np.exp(s).sum()):.4f}" in page
    assert repr(seen).startswith(re.search(r"^```text\n(kernel 'v2': 1 queries.*?)^```$", page, re.M | re.S)[1])
