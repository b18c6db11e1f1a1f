"""warmup: what a call would run is ready before it, and nothing has been computed."""

import numpy as np
import pytest

import numba_flash
from numba_flash.cpu import forward as cpu
from numba_flash.dispatch import forward as dispatch
from numba_flash.dispatch.launch import Launch

X = np.ones((1, 1, 3, 8), np.float32)


def test_it_loads_what_the_call_would_run_and_runs_nothing(monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "_plans", {})  # nothing prepared before

    class Spy(Launch):
        def __init__(self, choice, problem, target):
            self.facts = (choice.kernel, problem.right, problem.return_lse)

        def load(self):
            seen.append(self.facts)

    monkeypatch.setattr(dispatch, "make_launch", Spy)
    out = np.full_like(X, 7)
    assert numba_flash.warmup(X, X, X, causal=True, return_lse=True, out=(out, np.zeros((1, 1, 3), "f4"))) is None
    assert seen == [("cpu", 0, True)] and (out == 7).all()


# Small enough for one thread, and not.
@pytest.mark.parametrize(("seqlen", "run"), [(3, cpu.run_serial), (2000, cpu.run_parallel)])
def test_the_cpu_kernel_is_there_before_the_call(seqlen, run):
    x = np.ones((1, 1, seqlen, 64), np.float32)
    numba_flash.warmup(x, x, x)
    before = list(run.signatures)
    assert before
    numba_flash.attention(x, x, x)
    assert run.signatures == before


# What has nothing to compile.
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_nothing_to_compile_is_no_mistake(kernel):
    empty = X[:, :, :0]
    assert numba_flash.warmup(empty, X, X, kernel=kernel) is None


def test_it_raises_what_the_call_would_raise():
    with pytest.raises(TypeError, match="causal must be True or False"):
        numba_flash.warmup(X, X, X, causal=1)
    with pytest.raises(ValueError, match="dropout_p"):
        numba_flash.warmup(X, X, X, dropout_p=1.5)
    with pytest.raises(TypeError, match=r"attention\(\) got an unexpected keyword argument 'nonsense'"):
        numba_flash.warmup(X, X, X, nonsense=1)
