"""Runs on_four_devices.py and context_parallel_on_four_devices.py: JAX counts its devices once, when a process first
asks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

jax = pytest.importorskip("jax", reason="needs JAX")
pytest.importorskip("jax.experimental.buffer_callback", reason="needs a JAX with jax.experimental.buffer_callback")


@pytest.mark.parametrize("file", ["on_four_devices.py", "context_parallel_on_four_devices.py"])
def test_on_four_devices(file):
    environment = os.environ | dict(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-p", "no:xdist"]
    tests = Path(__file__).parent / file
    run = subprocess.run([*command, str(tests)], env=environment, capture_output=True, text=True)
    assert not run.returncode, run.stdout[-20000:]
