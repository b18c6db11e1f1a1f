"""The examples run as scripts; scripts/docs runs them as notebooks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path):
    pytest.importorskip("matplotlib")
    environment = os.environ | dict(MPLBACKEND="agg", PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert EXAMPLES
