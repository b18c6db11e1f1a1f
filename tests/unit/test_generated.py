"""What scripts write into docs and README is committed as they write it, and leaves no result out."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEASURED = "numba_flash/api/measured.py"


def check(script, root=ROOT, *more):
    command = [sys.executable, str(root / "scripts" / script), "--check", *more]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path):
    """What the scripts read and write, to be changed."""
    for name in ("docs", "scripts", "numba_flash"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", ["results_to_docs", "drawings", "why", "lessons_to_docs"])
def test_committed_is_what_the_script_writes(script):
    done = check(script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_bytes_on_the_page_why_are_those_that_the_simulator_counts():
    done = check("why", ROOT, "--counted")
    assert done.returncode == 0, done.stderr


def test_bytes_typed_by_hand_are_found(checkout):
    page = checkout / "docs" / "why.md"
    page.write_text(page.read_text().replace("| 17.00 |", "| 27.00 |"))
    done = check("why", checkout)
    assert done.returncode == 1 and "why.md" in done.stderr


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("docs/benchmarks.md", r"\d\.\d\d \|"),
        ("docs/verification.md", r"\d us [|(]"),
        ("docs/variants.md", r"\d\.\d\d\) \|"),
        ("README.md", r"\d\.\d\d \|"),
        (MEASURED, r"\d\.\d"),
    ],
)
def test_a_figure_typed_by_hand_is_found(checkout, name, figure):
    page = checkout / name
    text, changed = re.subn(figure, lambda match: "9" + match[0][1:], page.read_text(), count=1)
    assert changed
    page.write_text(text)
    done = check("results_to_docs", checkout)
    assert done.returncode == 1 and page.name in done.stderr


def test_a_changed_result_makes_the_pages_stale(checkout):
    path = checkout / "scripts" / "results" / "bench_forward_h200.json"
    result = json.loads(path.read_text())
    result["rows"][0]["tflops"]["wgmma"] *= 2
    path.write_text(json.dumps(result))
    done = check("results_to_docs", checkout)
    assert done.returncode == 1 and all(name in done.stderr for name in ("benchmarks.md", "README.md", "measured.py"))


def test_a_variant_that_was_not_measured_is_an_error(checkout):
    page = checkout / "docs" / "variants.md"
    page.write_text(page.read_text().replace("speed of causal,", "speed of casual,"))
    done = check("results_to_docs", checkout)
    assert done.returncode == 1 and "the speed of casual" in done.stderr


def test_a_model_that_was_not_measured_is_an_error(checkout):
    page = checkout / "docs" / "coming_from" / "natten.md"
    page.write_text(page.read_text().replace("times of neighbourhood", "times of neighborhood"))
    done = check("results_to_docs", checkout)
    assert done.returncode == 1 and "the times of neighborhood 13 x 13" in done.stderr


def test_a_measurement_of_the_lessons_becomes_a_table(checkout):
    """None was made yet."""
    result = json.loads((ROOT / "scripts" / "results" / "bench_forward_h200.json").read_text())
    rows = [dict(name="lessons/flash.py", dtype="float32", tflops=12.34, error=0.0)]
    made = dict(machine=result["machine"], shape=(4, 32, 4096, 64), repeats=20, ceiling=dict(float32=50.0), rows=rows)
    (checkout / "scripts" / "results" / "bench_lessons_h200.json").write_text(json.dumps(made))
    subprocess.run([sys.executable, str(checkout / "scripts" / "results_to_docs")], check=True)
    assert "| `lessons/flash.py` | float32 | 12.3 | 25 |" in (checkout / "docs" / "benchmarks.md").read_text()


def test_a_kind_of_result_without_a_section_is_an_error(checkout):
    (checkout / "scripts" / "results" / "new_kind_h200.json").write_text("{}")
    done = check("results_to_docs", checkout)
    assert done.returncode == 1 and "no section for new_kind_h200" in done.stderr


def test_a_drawing_changed_by_hand_is_found(checkout):
    drawing = checkout / "docs" / "drawings" / "tiles.svg"
    drawing.write_text(drawing.read_text().replace(">stays<", ">goes<"))
    done = check("drawings", checkout)
    assert done.returncode == 1 and "tiles.svg" in done.stderr
