"""watch: variables at the lines that a comment marks."""

import math

import numpy as np
import pytest
from numba import cuda, float32

from numba_flash.debug import race_check, watch
from numba_flash.machine import toolchain

pytestmark = pytest.mark.skipif(not toolchain.simulated(), reason="set NUMBA_ENABLE_CUDASIM=1")


@cuda.jit
def running_maximum(x, out):
    i = cuda.grid(1)
    row = cuda.local.array(2, float32)
    m = -math.inf
    for j in range(x.shape[1]):
        row[:] = m
        if j:
            late = j  # noqa: F841
        m = max(m, x[i, j])  # the new one; watch: i, j, m, row, late
    out[i] = m  # watch: m


@cuda.jit
def unmarked(out):
    out[0] = 1


@pytest.mark.parametrize("checked", [False, True])
def test_what_each_thread_holds_at_marked_lines(checked):
    x, out = np.float32([[1, 3, 2], [5, 4, 6]]), np.zeros(2, np.float32)
    with watch(running_maximum) as seen:
        if checked:
            with race_check():
                running_maximum[2, 1](x, out)
        else:
            running_maximum[2, 1](x, out)
    assert [tuple(one.block) for one in seen] == [(0, 0, 0)] * 4 + [(1, 0, 0)] * 4
    assert [one.values["m"] for one in seen] == [-np.inf, 1, 3, 3, -np.inf, 5, 5, 6]
    assert "late" not in seen[0].values and seen[1].values["late"] == 1
    assert [one.values["row"][0] for one in seen[:3]] == [-np.inf, 1, 3]  # copies
    assert len({one.line for one in seen}) == 2
    running_maximum[2, 1](x, out)
    assert len(seen) == 8


def test_a_kernel_without_marks():
    with (
        pytest.raises(ValueError, match="no line .*test_watch.py has a comment such as"),
        watch(unmarked),
    ):
        pass
    with pytest.raises(TypeError, match="watch takes the name of a kernel"), watch(3):
        pass
