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


def pytest_terminal_summary(terminalreporter):
    """What test_gates found, also where tests ran in processes of their own."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = {value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "gate"}
    if lines:
        terminalreporter.section("tensor-core kernels as compiled")
        terminalreporter.write_line(f"{'':26}   registers   spilled    local   shared seconds")
        for line in sorted(lines):
            terminalreporter.write_line(line)
