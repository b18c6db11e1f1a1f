"""score_mod and mask_mod on a GPU."""

import pytest
from contract_functions import *  # noqa: F403

from numba_flash.select import rungs


@pytest.fixture(autouse=True)
def takes_functions(rung, backward_rung):
    """Rungs that take none yet are left out."""
    for each in (rung, backward_rung):
        if each.kernel in rungs.TENSOR:
            pytest.skip(f"{each.kernel} takes no functions yet")
