"""Gradients of what a score_mod reads, on the simulated GPU kernels."""

import contract_backward
import pytest
from contract_aux import *  # noqa: F403

from numba_flash import testing
from numba_flash.select import rungs


@pytest.fixture(scope="session", params=["v2", "mma"])
def aux_rung(request):
    if request.param in rungs.TENSOR:
        return contract_backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True)
    return contract_backward.Rung(request.param)
