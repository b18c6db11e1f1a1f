"""The examples run as scripts; scripts/docs runs them as notebooks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TORCH = ROOT / "examples" / "train_a_language_model.py"


def run(path, **variables):
    """In a process of its own, as a user would: an example turns the simulator on where it wants it."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_ENABLE_CUDASIM"}
    # Threads of OpenMP that wait busily take ten times as long beside other tests.
    environment |= dict(MPLBACKEND="agg", OMP_WAIT_POLICY="PASSIVE", PYTHONPATH=str(ROOT)) | variables
    return subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path):
    pytest.importorskip("matplotlib")
    if path == TORCH:
        pytest.importorskip("torch", reason="needs torch")
    done = run(path)
    assert done.returncode == 0, done.stderr


def test_without_torch_an_example_says_so(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = run(TORCH, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1
    assert done.stderr == "This example needs torch, which is not installed: pip install torch\n"


def test_each_example_is_a_page_and_no_other_is():
    index = (ROOT / "docs" / "index.md").read_text()
    trees = "\n".join(re.findall(r"^```\{toctree\}(.*?)^```", index, re.MULTILINE | re.DOTALL))
    assert sorted(re.findall(r"^examples/(\w+)$", trees, re.MULTILINE)) == [path.stem for path in EXAMPLES]
    assert len(EXAMPLES) >= 5


def test_only_one_example_needs_torch():
    """docs/conf.py does not run that one where torch is not installed."""
    assert [path for path in EXAMPLES if re.search(r"^ *import torch", path.read_text(), re.MULTILINE)] == [TORCH]
