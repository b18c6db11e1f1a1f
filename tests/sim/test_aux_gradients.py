"""Gradients of what a score_mod reads, on the simulated GPU kernels."""

import pytest
from contracts import backward, daux, suite

from numba_flash import testing
from numba_flash.abi import arguments
from numba_flash.select import rungs

TestDaux = suite(daux)


@pytest.fixture(scope="session", params=["v2", "mma"])
def aux_rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True)
    return backward.Rung(request.param, slow=True)


# As if there were 2^31 scores: a sum has so few bits then that float64 needs its second one.
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_many_scores(monkeypatch, nothing_remembered, dtype):
    of_problem = arguments.sizes_of_aux
    monkeypatch.setattr(arguments, "sizes_of_aux", lambda problem: of_problem(problem) | dict(term_bits=31))
    found = daux.found_by(backward.Rung("v2"), daux.case_of(dtype))
    assert all(daux.agree(*both, dtype) for both in zip(found[:2], daux.oracle(dtype, ())[:2], strict=True))
