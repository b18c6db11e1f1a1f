"""The contract of gradients on the oracle and on the CPU rung."""

import numpy as np
import pytest
from contracts import backward, suite
from contracts.backward import NAMES, Rung, incoming, same_bits

import numba_flash
from numba_flash import testing

TestBackward = suite(backward)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def rung(request):
    return Rung(request.param)


# Each family that has arrays in host memory; what comes in goes out.
@pytest.mark.parametrize("family", ["torch", "jax"])
def test_frameworks_get_their_own_arrays(rung, family):
    framework = pytest.importorskip(family)
    move = framework.from_numpy if family == "torch" else framework.numpy.asarray
    bias = np.zeros((9, 14), np.float32)
    case = rung.problem(9, 14, bias=bias, causal=True)
    do, o, lse, dlse = incoming(case)
    expected = rung(case, (do, o, lse, dlse))
    gradients = numba_flash.attention_backward(
        move(do), **case.arguments(move), o=move(o), lse=move(lse), dlse=move(dlse), kernel=rung.kernel,
        wanted=("dq", "dk", "dv", "dbias"),
    )  # fmt: skip
    for name in ("dq", "dk", "dv", "dbias"):
        assert type(getattr(gradients, name)) is type(move(do))
        assert same_bits(np.asarray(getattr(gradients, name)), getattr(expected, name))


# Each gradient nonfinite by an error that float32 does not explain, by a NaN, and by another dtype.
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["off", "nan", "dtype"])
def test_the_check_can_fail(name, how):
    slopes, bias = np.array([0.5, 0.125], np.float32), np.zeros((9, 14), np.float32)
    sinks = np.array([1.5, -0.5], np.float32)
    case = Rung("reference").problem(9, 14, alibi_slopes=slopes, bias=bias, sinks=sinks)
    given = incoming(case)
    right = Rung("reference").check(case, given)
    with pytest.raises(AssertionError, match=f" {name}"):
        testing.check_gradients(case, right._replace(**{name: nonfinite(getattr(right, name), how)}), *given)


@pytest.mark.parametrize("how", ["off", "nan", "dtype"])
def test_the_check_of_aux_can_fail(how):
    table, ids = np.random.default_rng(0).standard_normal((2, 7), dtype=np.float32), np.arange(14) % 7
    case = Rung("reference").problem(
        9, 14, score_mod=lambda s, b, h, i, j, table, ids: s * table[h, ids[j]], aux=(table, ids), softcap=2.0
    )
    given = incoming(case)
    right = Rung("reference")(case, given, ("dq", "daux[0]"))
    testing.check_gradients(case, right, *given)
    with pytest.raises(AssertionError, match=r" daux\[0\]"):
        testing.check_gradients(case, right._replace(daux=(nonfinite(right.daux[0], how), None)), *given)


def nonfinite(x, how):
    if how == "dtype":
        return x.astype(np.float64)
    wrong = x.copy()
    if how == "off":
        wrong += np.float32(1e-4) * np.abs(wrong).max()
    else:
        wrong.flat[-1] = np.nan
    return wrong
