"""Gradients of what a score_mod reads, on the simulated GPU kernels."""

import contract_backward
import pytest
from contract_aux import *  # noqa: F403


@pytest.fixture(scope="session")
def aux_rung():
    return contract_backward.Rung("v2")
