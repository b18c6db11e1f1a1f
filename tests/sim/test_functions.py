"""score_mod and mask_mod on the GPU kernels, simulated."""

import contract
import contract_backward
import pytest
from contract_functions import *  # noqa: F403

SMALL = dict(max_seqlen=36, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a Python thread


@pytest.fixture(scope="session", params=["v1", "v2"])
def rung(request):
    return contract.Rung(request.param, limits=SMALL)


@pytest.fixture(scope="session")
def backward_rung():
    return contract_backward.Rung("v2", limits=SMALL)
