"""The tests that need torch, JAX or Transformers: `pip install 'numba-flash[bridges]'`. Without them they are skipped.

Those with a `device` run on the CPU and, where torch finds one, on an NVIDIA GPU.
"""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # beside torch, and beside other workers

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the simulator is on: unset NUMBA_ENABLE_CUDASIM"))


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """torch's threads wait for each other busily: beside those of another test that takes ten times as long."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    torch = pytest.importorskip("torch", reason="needs torch")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    return request.param
