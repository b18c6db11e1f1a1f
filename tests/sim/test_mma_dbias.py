"""The gradient of bias by mma_dbias, simulated."""

import pytest
from contract_backward import Rung
from contract_dbias import *  # noqa: F403

from numba_flash import testing


@pytest.fixture(scope="module")
def dbias_rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)
