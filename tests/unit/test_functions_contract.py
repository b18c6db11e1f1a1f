"""score_mod and mask_mod on the oracle and on the CPU rung, against formulas and other options."""

import contract
import contract_backward
import pytest
from contract_aux import *  # noqa: F403
from contract_functions import *  # noqa: F403


@pytest.fixture(scope="session", params=["reference", "cpu"])
def rung(request):
    return contract.Rung(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def backward_rung(request):
    return contract_backward.Rung(request.param)


@pytest.fixture(scope="session", params=["reference", "cpu"])
def aux_rung(request):
    return contract_backward.Rung(request.param)
