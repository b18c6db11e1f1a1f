"""The contract of gradients on v2's kernels, simulated."""

import pytest
from contract_backward import *  # noqa: F403
from contract_backward import Rung

SMALL = dict(max_seqlen=36, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a Python thread


@pytest.fixture(scope="module")
def rung():
    return Rung("v2", limits=SMALL)
