"""A bundle on a GPU: what a program loaded is loaded again where Numba is not installed, and computes the same."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
import cupy, numpy as np
import numba_flash

rng = np.random.default_rng(0)
q, k, v, do = (cupy.asarray(rng.standard_normal((1, 4, 200, 64)).astype("f2")) for _ in range(4))
o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True)
dq, dk, dv, *_ = numba_flash.attention_backward(do, q, k, v, o, lse, causal=True)
near = numba_flash.attention(q, k, v, score_mod=lambda score, b, h, i, j: score - abs(i - j) / 7)
np.savez(sys.argv[1], **{name: x.get() for name, x in dict(o=o, lse=lse, dq=dq, dk=dk, dv=dv, near=near).items()})
"""
WITHOUT = """
import runpy, sys
sys.path[:0] = [{root!r}, {tests!r}]
from helpers import without_compiler
without_compiler.forbid()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
assert without_compiler.imported() == []
"""


def test_a_bundle_is_loaded_without_a_compiler(tmp_path):
    program, bundle = tmp_path / "program.py", tmp_path / "bundle"
    program.write_text(PROGRAM)

    def python(cache, *arguments, **environment):
        own = dict(PYTHONPATH=str(ROOT), NUMBA_FLASH_CACHE_DIR=str(tmp_path / cache), **environment)
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = python("one", "-m", "numba_flash", "bundle", bundle, "--run", program, tmp_path / "compiled.npz")
    assert "kernels are new in" in printed and list(bundle.rglob("*.cubin"))
    without = WITHOUT.format(root=str(ROOT), tests=str(ROOT / "tests"))
    named = dict(NUMBA_FLASH_BUNDLE=str(bundle), NUMBA_FLASH_BUNDLE_ONLY="1")
    python("another", "-c", without, program, tmp_path / "loaded.npz", **named)
    assert not (tmp_path / "another").exists()
    compiled, loaded = (np.load(tmp_path / f"{name}.npz") for name in ("compiled", "loaded"))
    for name in compiled.files:  # the driver and ptxas need not order every sum alike
        np.testing.assert_allclose(loaded[name].astype("f4"), compiled[name].astype("f4"), rtol=1e-2, atol=1e-2)
