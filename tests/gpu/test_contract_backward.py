"""The contract of gradients on the GPU's kernels."""

import pytest
from contract_backward import *  # noqa: F403


@pytest.fixture(scope="module")
def rung(backward_rung):
    return backward_rung
