"""The tests that run GPU kernels in Numba's CUDA simulator: NUMBA_ENABLE_CUDASIM=1 before Python starts."""

import os
from pathlib import Path

import contract
import pytest

HERE = Path(__file__).parent
ON = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


def pytest_collection_modifyitems(items):
    if not ON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the simulator is off: set NUMBA_ENABLE_CUDASIM=1"))


# Every attention kernel that is written for GPUs.
@pytest.fixture(scope="session", params=["v1", "v2"])
def rung(request):
    return contract.Rung(request.param, small=True)
