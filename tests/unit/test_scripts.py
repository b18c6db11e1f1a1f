"""Scripts of a fresh clone: they say what they need, and go on in .venv where it is there."""

import fnmatch
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
NEEDS = runpy.run_path(str(SCRIPTS / "_clone.py"))["NEEDS"]
PYTHON = [
    p.name for p in sorted(SCRIPTS.iterdir()) if p.is_file() and p.read_bytes().startswith(b"#!/usr/bin/env python3")
]
WITH_NOTHING = {"results_to_docs", "drawings", "lessons_to_docs", "exercises_notebook"}  # need Python only


@pytest.fixture
def clone(tmp_path):
    shutil.copytree(SCRIPTS, tmp_path / "scripts", ignore=shutil.ignore_patterns("results", "__pycache__"))
    (tmp_path / "tests").mkdir()
    return tmp_path


def run(clone, script):
    """With a Python that has nothing installed: -I -S leaves site-packages out. The script's folder is put back."""
    path = clone / "scripts" / script
    code = f"import runpy, sys; sys.path.insert(0, {str(path.parent)!r}); sys.argv = [{str(path)!r}]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)


def test_every_script_is_known():
    assert set(NEEDS) | WITH_NOTHING == set(PYTHON)


def test_ruff_reads_every_script():
    """They are commands without an ending, so ruff.toml has to name them."""
    named = re.findall(r'"scripts/(\S+?)"', (ROOT / "ruff.toml").read_text().partition("extend-exclude")[0])
    assert [name for name in PYTHON if not any(fnmatch.fnmatch(name, pattern) for pattern in named)] == []


@pytest.mark.parametrize("script", sorted(NEEDS))
def test_a_missing_package_is_named_with_the_command_that_brings_it(clone, script):
    done = run(clone, script)
    packages, extras = NEEDS[script]
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"scripts/{script} needs {', '.join(packages)}." in done.stderr
    assert f".venv/bin/python -m pip install -e '.[{extras}]'" in done.stderr


def test_the_extras_are_there():
    declared = re.findall(r"^(\w+) =", (ROOT / "setup.cfg").read_text().partition("extras_require]")[2], re.MULTILINE)
    assert {extra for _, extras in NEEDS.values() for extra in extras.split(",")} <= set(declared)


@pytest.mark.skipif(sys.platform == "win32", reason="a script stands for .venv's Python")
def test_it_goes_on_in_the_environment_of_the_clone(clone):
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "in .venv: $*"\nexit 7\n')
    python.chmod(0o755)
    done = run(clone, "step")
    assert done.returncode == 7 and done.stdout == f"in .venv: {clone / 'scripts' / 'step'}\n"


STAND_IN = """#!/bin/sh
# .venv's Python: runs the tests, and leaves out the checks before them
case "$2" in ruff | mypy | pip) exit 0 ;; esac
exec {python} "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="runs a shell's script")
def test_what_failed_is_named_last(clone):
    """In both parts, of which the second one runs though the first one fails."""
    pytest.importorskip("xdist")
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    (clone / "setup.cfg").write_text("[tool:pytest]\naddopts = --import-mode=importlib\n")
    (clone / ".venv" / "test-ready").touch()
    for folder in ("sim", "bridges", "gpu", "unit"):
        (clone / "tests" / folder).mkdir()
        body = (
            "import pytest\n\ndef test_that_passes():\n    pass\n\ndef test_that_skips():\n    pytest.skip('no GPU')\n"
        )
        if folder == "sim":
            body += "\ndef test_that_fails():\n    assert 1 == 2\n"
        if folder == "unit":
            body += "\nclass TestOfClass:\n    def test_that_fails(self):\n        assert 1 == 2\n"
        (clone / "tests" / folder / f"test_{folder}.py").write_text(body)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        ["sh", "scripts/test"], cwd=clone, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "FAILED tests/sim/test_sim.py::test_that_fails - assert 1 == 2",
        "FAILED tests/unit/test_unit.py::TestOfClass::test_that_fails - assert 1 == 2",
    ]


def test_results_name_the_commit(clone):
    commit = runpy.run_path(str(SCRIPTS / "_clone.py"))["commit"]()
    if (ROOT / ".git").exists() and shutil.which("git"):
        assert re.fullmatch(r"[0-9a-f]{12}\+?", commit["commit"])
    assert runpy.run_path(str(clone / "scripts" / "_clone.py"))["commit"]() == {}, "no repository is no error"


def test_every_benchmark_records_it():
    for script in PYTHON:
        text = (SCRIPTS / script).read_text()
        if "json.dump" in text and script != "exercises_notebook":  # which measures nothing
            assert "machine()" in text or "commit()" in text, script
    assert "**commit()" in (SCRIPTS / "_gpu.py").read_text()
    assert importlib.util.find_spec("numba_flash")


# A process of its own: what compiles kernels with a caller's functions copies the process that it runs in.
OWN_FUNCTIONS = """
import sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import _gpu
from numba_flash.config.wgmma_backward import WgmmaDqConfig
from numba_flash.functions.function import Function
from numba_flash.problem.options import uses

def kernel(head_dim, value):
    made = uses(mask_mod=Function.of("mask_mod", lambda b, h, i, j: j <= i + value))
    return WgmmaDqConfig("float16", head_dim, head_dim, 64, 64, uses=made), (9, 0)

def compile_one(job):
    if job[0].head_dim == 32:
        return "one that fails"
    Path({folder!r}, str(job[0].head_dim)).touch()

_gpu._compile = compile_one
_gpu.compiled.read_cache = lambda config, arch: b"" if config.head_dim == 64 else None
_gpu.compile_ahead([kernel(head_dim, head_dim) for head_dim in (16, 32, 48, 64, 80)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be copied on this system")
def test_kernels_with_functions_are_compiled_ahead(tmp_path):
    program = OWN_FUNCTIONS.format(scripts=str(SCRIPTS), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert {file.name for file in tmp_path.iterdir()} == {"16", "48", "80"}, done.stderr
    assert "did not compile: one that fails" in done.stdout and "compiled 3 kernels" in done.stdout


BESIDE = """
import sys
import time
sys.path.insert(0, {scripts!r})
from _processes import Processes

def work(job):
    if job == "fails":
        error = RuntimeError("\\nno compiler\\nand more")
        error.module = sys  # which cannot be sent to another process
        raise error
    if job == "hangs":
        time.sleep(600)

if __name__ == "__main__":
    running = Processes(work, ["fails", "works", "hangs"], 3)
    print(running.errors(time.monotonic() + {seconds}))
"""


def test_processes_end_when_their_time_is_up(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(BESIDE.format(scripts=str(SCRIPTS), seconds=5))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{'fails': 'no compiler', 'hangs': 'not done in time'}\n", done.stderr


# Read by another program, the script does not look whether all is there that it needs to measure.
READ = """
import runpy, sys
sys.path.insert(0, {scripts!r})
sys.argv = ["bench_variants", "--variants", "plain,alibi"]
read = runpy.run_path({scripts!r} + "/bench_variants")
{then}
"""


def bench_variants(then):
    program = READ.format(scripts=str(SCRIPTS), then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_an_unknown_variant_is_named():
    done = bench_variants("read['main']()")
    assert done.returncode == 2 and "--variants: no alibi; there are plain, causal" in done.stderr, done.stderr


def test_the_names_of_variants_are_those_that_there_are():
    pytest.importorskip("torch")
    done = bench_variants("print(tuple(read['variants']('cpu', 1, 1, 8)) == read['NAMES'])")
    assert done.stdout == "True\n", done.stderr
