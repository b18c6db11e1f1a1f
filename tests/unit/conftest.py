"""The tests that need nothing but the base install. The simulator must be off."""

import os
from pathlib import Path

import contract
import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the simulator is on: unset NUMBA_ENABLE_CUDASIM"))


# The two rungs that compute in host memory.
@pytest.fixture(scope="session", params=["reference", "cpu"])
def rung(request):
    return contract.Rung(request.param)
