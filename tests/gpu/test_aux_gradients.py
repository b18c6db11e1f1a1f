"""Gradients of what a score_mod reads, on the GPU's kernels."""

import pytest
from contract_aux import *  # noqa: F403


@pytest.fixture
def aux_rung(backward_rung):
    if backward_rung.kernel == "wgmma":
        pytest.skip("wgmma's backward takes no functions yet")
    return backward_rung
