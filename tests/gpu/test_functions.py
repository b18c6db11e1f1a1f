"""score_mod and mask_mod on a GPU."""

import pytest
from contract_functions import *  # noqa: F403


@pytest.fixture(autouse=True)
def takes_functions(request):
    """wgmma's backward takes none yet."""
    rung = request.getfixturevalue("backward_rung") if "backward_rung" in request.fixturenames else None
    if rung is not None and rung.kernel == "wgmma":
        pytest.skip(f"{rung.kernel}'s backward takes no functions yet")
