"""Gradients of what a score_mod reads, on the GPU's kernels."""

import pytest
from contracts import daux, suite

TestDaux = suite(daux)


@pytest.fixture
def aux_rung(backward_rung):
    if backward_rung.kernel == "wgmma":
        pytest.skip("wgmma's backward takes no functions yet")
    return backward_rung
