"""The contract of gradients on v2's kernels, simulated."""

import numpy as np
import pytest
from contracts import backward, suite
from contracts.backward import Rung

import numba_flash
from numba_flash.ptx.sim import launch

TestBackward = suite(backward)

SMALL = dict(max_seqlen=36, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a thread, run by Python


@pytest.fixture(scope="module")
def rung():
    return Rung("v2", limits=SMALL, slow=True)


def test_a_problem_of_minutes_is_announced(monkeypatch):
    """At the caller's line; the launches themselves are left out. The forward alone would not be announced."""
    monkeypatch.setattr(launch, "run", lambda *arguments: None)
    x = np.zeros((1, 4, 160, 64), np.float32)
    numba_flash.attention(x, x, x, kernel="v2")
    with pytest.warns(RuntimeWarning, match=r"about \d+ min in Numba's CUDA simulator") as seen:
        numba_flash.attention_backward(x, x, x, x, x, x[..., 0].copy(), kernel="v2")
    assert seen[0].filename == __file__
