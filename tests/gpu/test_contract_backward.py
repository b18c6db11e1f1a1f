"""The contract of gradients on the GPU's kernels."""

import pytest
from contracts import backward, suite

TestBackward = suite(backward)


@pytest.fixture(scope="module")
def rung(backward_rung):
    return backward_rung
