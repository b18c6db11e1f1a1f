"""Gradients of what a score_mod reads, on the simulated GPU kernels."""

import pytest
from contracts import backward, daux, suite

from numba_flash import testing
from numba_flash.abi import arguments
from numba_flash.select import rungs

TestDaux = suite(daux)


@pytest.fixture(scope="session", params=["v2", "mma"])
def aux_rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True)
    return backward.Rung(request.param)


