"""score_mod and mask_mod on the oracle and on the CPU rung, against formulas and other options."""

import pytest
from contracts import backward, daux, forward, functions, suite

TestDaux = suite(daux)
TestFunctions = suite(functions)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def rung(request):
    return forward.Rung(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backward_rung(request):
    return backward.Rung(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def aux_rung(request):
    return backward.Rung(request.param)
