"""score_mod and mask_mod on a GPU."""

import pytest
from contract_functions import *  # noqa: F403

from numba_flash.select import rungs


@pytest.fixture(autouse=True)
def takes_functions(backward_rung):
    """The backward on tensor cores takes none yet."""
    if backward_rung.kernel in rungs.TENSOR:
        pytest.skip(f"{backward_rung.kernel}'s backward takes no functions yet")
