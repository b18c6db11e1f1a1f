"""The gradient of bias by mma_dbias on a GPU."""

import pytest
from contracts import dbias, suite

TestDbias = suite(dbias)


@pytest.fixture
def dbias_rung(backward_rung):
    if backward_rung.kernel != "mma" or backward_rung.usual.startswith("float") and backward_rung.usual != "float16":
        pytest.skip("mma in 16 bits has a kernel of its own for it")
    return backward_rung
