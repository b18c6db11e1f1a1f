"""The tests that need nothing but the base install. The simulator must be off."""

import os
from pathlib import Path

import contract
import gate_results
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
    """What test_gates found, also where tests ran in processes of their own. scripts/gates has it written down."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [found for report in reports for found in getattr(report, "user_properties", ())]
    gates = dict(value for name, value in properties if name == "gate")
    if gates:
        terminalreporter.section("tensor-core kernels as compiled")
        terminalreporter.write_line(f"{'':34}   registers   spilled    local   shared seconds")
        for line in sorted(result["line"] for result in gates.values()):
            terminalreporter.write_line(line)
        if os.environ.get("NUMBA_FLASH_WRITE_GATES"):
            gate_results.keep(gates)
