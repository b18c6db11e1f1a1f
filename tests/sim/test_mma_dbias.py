"""The gradient of bias by mma_dbias, simulated."""

import pytest
from contracts import dbias, suite
from contracts.backward import Rung

from numba_flash import testing

TestDbias = suite(dbias)


@pytest.fixture(scope="module")
def dbias_rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)
