"""The tests that need nothing but the base install. The simulator must be off."""

import os
from pathlib import Path

import pytest
from contracts import forward
from helpers import gate_results

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the simulator is on: unset NUMBA_ENABLE_CUDASIM"))


# The two rungs that compute in host memory.
@pytest.fixture(scope="session", params=["reference", "cpu"])
def rung(request):
    return forward.Rung(request.param)


def pytest_terminal_summary(terminalreporter, exitstatus):
    """What test_gates found, also where tests ran in processes of their own. scripts/gates has it written down."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    properties = [found for report in reports for found in getattr(report, "user_properties", ())]
    gates = {value[0]: value[1:] for name, value in properties if name == "gate"}
    if not gates:
        return
    compiled = sorted(result["line"] for result, was_kept in gates.values() if not was_kept)
    kept = len(gates) - len(compiled)
    terminalreporter.section(f"tensor-core kernels: {len(compiled)} compiled, {kept} as kept in gate_results.json")
    if compiled:
        terminalreporter.write_line(f"{'':34}   registers   spilled    local   shared seconds")
    for line in compiled:
        terminalreporter.write_line(line)
    if os.environ.get("NUMBA_FLASH_WRITE_GATES"):
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        whole = ended and not gate_results.chosen(terminalreporter.config)
        gate_results.keep({name: result for name, (result, _) in gates.items()}, whole=whole)
