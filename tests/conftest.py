"""For all tiers: how thorough hypothesis is, and asserts that explain themselves in the shared modules."""

import gc
import os

import hypothesis
import pytest

pytest.register_assert_rewrite("contract", "contract_backward", "contract_dropout", "contract_functions", "metamorphic")

# deadline: the first call of a kernel compiles it. derandomize: a red run is red again for everybody.
hypothesis.settings.register_profile("unit", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("sim", hypothesis.settings.get_profile("unit"), max_examples=12)
hypothesis.settings.load_profile("sim" if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1" else "unit")


def pytest_unconfigure():
    """A process that ends looks for garbage in all that it has loaded: with torch and JAX 6 s, and 1 without."""
    gc.freeze()
