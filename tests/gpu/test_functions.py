"""score_mod and mask_mod on a GPU."""

import pytest
from contract_functions import *  # noqa: F403

from numba_flash.select import rungs


@pytest.fixture(autouse=True)
def takes_functions(request):
    """The backward on tensor cores takes none yet."""
    rung = request.getfixturevalue("backward_rung") if "backward_rung" in request.fixturenames else None
    if rung is not None and rung.kernel in rungs.TENSOR:
        pytest.skip(f"{rung.kernel}'s backward takes no functions yet")
