"""The contract on the oracle and on the CPU rung."""

import numpy as np
import pytest
from contracts import forward, suite
from hypothesis import given

from numba_flash import testing

TestForward = suite(forward)


@given(testing.cases(dtypes=("float64",), max_seqlen=30))
def test_the_oracle_agrees_with_a_second_writing_of_the_formula(case):
    o, lse = testing.oracle(case)
    plain_o, plain_lse = testing.plain(case)
    assert np.allclose(o, plain_o, rtol=1e-10, atol=1e-10)
    assert np.allclose(lse, plain_lse, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wrong", ["o", "lse", "nan", "shape", "dtype"])  # each thing that check looks at
def test_the_check_can_fail(wrong):
    case = forward.problem()
    o, lse = testing.oracle(case)
    o, lse = o.astype(np.float32), lse.astype(np.float32)
    testing.check(case, o, lse)
    if wrong == "o":
        o = o + np.float32(1e-3)
    elif wrong == "lse":
        lse = lse * np.float32(np.log2(np.e))  # base 2, the commonest slip
    elif wrong == "nan":
        o[0, 0, 0, 0] = np.nan
    elif wrong == "shape":
        o = o[..., None]
    else:
        o = o.astype(np.float64)
    with pytest.raises(AssertionError):
        testing.check(case, o, lse)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_check_looks_at_finite_rows_beside_strange_ones(value):
    case = forward.problem(batch=1, causal=True)
    case.v[:, :, 25] = value
    o, lse = (x.astype(np.float32) for x in testing.oracle(case))
    assert np.isfinite(o[:, :, 0]).all() and not np.isfinite(o[:, :, -1]).any()
    testing.check(case, o, lse)
    o[0, 0, 0, 0] += 1e-3
    with pytest.raises(AssertionError, match="off by 0.001"):
        testing.check(case, o, lse)
