"""Reads outside an array that follow from the shapes: an error before anything runs, on every rung."""

import numpy as np
import pytest

import numba_flash
from numba_flash import mods

Q, K = np.zeros((2, 4, 5, 8), np.float32), np.zeros((2, 4, 8, 8), np.float32)


def explained(q_offset=None, **options):
    return numba_flash.explain(Q, K, K, q_offset=q_offset, **options)


OUTSIDE = {
    "h": (lambda s, b, h, i, j, x: s + x[h], (3,)),
    "b": (lambda s, b, h, i, j, x: s + x[b, 0], (1, 4)),
    "k_pos": (lambda s, b, h, i, j, x: s + x[h, j], (4, 7)),
    "row of an array": (lambda s, b, h, i, j, x: s + x[h][j], (4, 7)),
    "q_pos, which begins at 3": (lambda s, b, h, i, j, x: s + x[i], (5,)),
    "q_index": (lambda s, b, h, i, j, q_index, x: s + x[q_index], (4,)),
    "a position and a number": (lambda s, b, h, i, j, x: s + x[j + 1], (8,)),
    "from the end": (lambda s, b, h, i, j, x: s + x[-j - 2], (8,)),
    "a number": (lambda s, b, h, i, j, x: s + x[2], (2,)),
    "an empty array": (lambda s, b, h, i, j, x: s + x[h, j], (0, 11)),
    "an empty array at an unknown index": (lambda s, b, h, i, j, x: s + x[int(s)], (0,)),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_reads_that_are_outside_whatever_the_values_are(name):
    function, shape = OUTSIDE[name]
    line = function.__code__.co_firstlineno
    with pytest.raises(IndexError, match=rf"score_mod: <lambda> \(.*, line {line}\): .* outside axis \d of aux\[0\]"):
        explained(score_mod=function, aux=(np.zeros(shape),))


def test_a_position_before_the_array():
    with pytest.raises(IndexError, match="q_pos from -1 to 3 reads outside.*q_index the row of q"):
        explained(-1, score_mod=lambda s, b, h, i, j, x: s + x[i], aux=(np.zeros(9),))
    explained(-1, score_mod=lambda s, b, h, i, j, x: s + x[i], aux=(np.zeros(9),), causal=True)  # row 0 sees no key


INSIDE = {
    "its whole length": (lambda s, b, h, i, j, x: s + x[h, i] + x[3, j - 8] + x[-4, 0], (4, 8), {}),
    "behind a decision": (lambda s, b, h, i, j, x: s + x[j] if j < 3 else s, (3,), {}),
    "by another function": (lambda s, b, h, i, j, x: s + x[min(j, 2)], (3,), {}),
    "the same position twice": (lambda s, b, h, i, j, x: s + x[i - i], (1,), {}),
    "in a loop": (lambda s, b, h, i, j, x: s + sum_of(x, 3), (3,), {}),
    "hidden by a length": (lambda s, b, h, i, j, x: s + x[j], (3,), dict(seqlens_k=np.int32([3, 2]))),
    "hidden by a mask": (lambda s, b, h, i, j, x: s + x[j], (3,), dict(mask=np.arange(8) < 3)),
    "hidden by mask_mod": (lambda s, b, h, i, j, x: s + x[j], (3,), dict(mask_mod=lambda b, h, i, j, x: j < 3)),
    "hidden by a window": (lambda s, b, h, i, j, x: s + x[j], (5,), dict(causal=True, q_offset=0)),
    "rows that see nothing": (lambda s, b, h, i, j, q_index, x: s + x[i], (8,), dict(window=(0, 0), q_offset=6)),
}


def sum_of(x, count):
    total = 0.0
    for n in range(count):
        total += x[n]
    return total


@pytest.mark.parametrize("name", INSIDE)
def test_reads_that_are_inside_or_not_known(name):
    function, shape, options = INSIDE[name]
    options = dict(q_offset=None, score_mod=function, aux=(np.zeros(shape),)) | options
    explained(**options)
    numba_flash.attention(Q, K, K, **options, kernel="reference")


def test_ready_made_functions_read_inside():
    explained(mask_mod=mods.document, aux=(np.zeros((2, 8), np.int32),))
    with pytest.raises(IndexError, match="q_pos from 3 to 7 reads outside axis 1 of aux"):
        explained(mask_mod=mods.document, aux=(np.zeros((2, 7), np.int32),))
