"""The tests that need nothing but the base install. The simulator must be off."""

import gc
import os
from pathlib import Path

import contract
import liveness
import pytest

from numba_flash import toolchain

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


@pytest.fixture(scope="module")
def quick_compiling():
    """For tests that compile a lot: two thirds of the time, for the same PTX.

    Numba analyses what is alive where by tests/liveness.py; and Python looks for garbage seldom, since compiling makes
    many objects that stay.
    """
    toolchain.cuda()
    thresholds = gc.get_threshold()
    with pytest.MonkeyPatch.context() as patch:
        if liveness.analysis() is not None:
            patch.setattr(liveness.analysis(), "compute_live_map", liveness.compute_live_map)
        gc.set_threshold(20_000, 50, 100)
        yield
        gc.set_threshold(*thresholds)


def pytest_terminal_summary(terminalreporter):
    """What test_gates found, also where tests ran in processes of their own."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = {value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "gate"}
    if lines:
        terminalreporter.section("tensor-core kernels as compiled")
        terminalreporter.write_line(f"{'':26}   registers   spilled    local   shared seconds")
        for line in sorted(lines):
            terminalreporter.write_line(line)
