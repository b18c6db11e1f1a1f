"""The tests that run GPU kernels in Numba's CUDA simulator: NUMBA_ENABLE_CUDASIM=1 before Python starts."""

import dataclasses
import os
from pathlib import Path

import contract
import pytest

from numba_flash import testing
from numba_flash.select import rungs

HERE = Path(__file__).parent
ON = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


def pytest_collection_modifyitems(items):
    if not ON:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the simulator is off: set NUMBA_ENABLE_CUDASIM=1"))


@pytest.fixture(autouse=True, scope="session")
def one_core():
    """Each of pytest-xdist's processes stays on a core of its own, where there is one for each.

    A simulated block's threads take turns. Where they hand on from core to core, a test takes half as much time again.
    """
    worker, workers = (os.environ.get(f"PYTEST_XDIST_WORKER{suffix}") for suffix in ("", "_COUNT"))
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if worker is not None and workers == str(len(cores)):
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw"))]})  # of this thread and those that it starts


SMALL = dict(max_seqlen=40, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a Python thread
TENSOR = SMALL | dict(dtypes=("float16", "bfloat16"), strange_strides=False, max_seqlen=80)  # every tile is of 64 keys


def tensor(kernel):
    rung = contract.Rung(kernel, testing.rows_padded, tensor=True, tile=64, slow=True)
    return dataclasses.replace(rung, limits=TENSOR)


# Every attention kernel that is written for GPUs; wgmma, which takes longer, is in test_wgmma.
@pytest.fixture(scope="session", params=["v1", "v2", "mma"])
def rung(request):
    if request.param in rungs.TENSOR:
        return tensor(request.param)
    return contract.Rung(request.param, limits=SMALL)
