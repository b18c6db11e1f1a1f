"""The part of the contract that wgmma is run through in the simulator: all of it takes minutes, and runs on a GPU."""

import contract
import pytest
from contract import test_any_strides, test_many_tiles, test_rows_of_any_stride  # noqa: F401

from numba_flash import testing


@pytest.fixture(scope="session")
def rung():
    return contract.Rung("wgmma", testing.rows_padded, tensor=True, tile=64, slow=True)
