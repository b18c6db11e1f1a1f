"""score_mod and mask_mod on the oracle, against formulas and other options."""

import contract
import contract_backward
import pytest
from contract_functions import *  # noqa: F403


@pytest.fixture(scope="session")
def rung():
    return contract.Rung("reference")


@pytest.fixture(scope="session")
def backward_rung():
    return contract_backward.Rung("reference")
