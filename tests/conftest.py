"""For all tiers: how thorough hypothesis is, and asserts that explain themselves in the shared modules."""

import gc
import os

import hypothesis
import pytest

from numba_flash.machine import toolchain

pytest.register_assert_rewrite("contracts")

if toolchain.simulated():  # before any test imports numba.cuda by itself: NumPy 2.5 warns about it then
    toolchain.cuda()

# deadline: the first call of a kernel compiles it. derandomize: a red run is red again for everybody.
hypothesis.settings.register_profile("unit", deadline=None, derandomize=True, max_examples=60, print_blob=True)
hypothesis.settings.register_profile("sim", hypothesis.settings.get_profile("unit"), max_examples=6)
hypothesis.settings.load_profile("sim" if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1" else "unit")


# Looking for garbage took 7 % of the time of the simulator's tests. What is imported and collected is none, and after
# that it is looked for less often.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure():
    """A process that ends looks for garbage in all that it has loaded: with torch and JAX 6 s, and 1 without."""
    gc.freeze()
