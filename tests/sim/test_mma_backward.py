"""The contract of gradients on mma's kernels, simulated, in tiles of 32 x 32; and what only their Configs can show."""

import pytest
from contract_backward import *  # noqa: F403
from contract_backward import Rung

from numba_flash import testing

SMALL = dict(
    max_seqlen=48, max_batch=2, head_dims=(1, 7, 16, 32), dtypes=("float16", "bfloat16"), strange_strides=False
)


@pytest.fixture(scope="module")
def rung():
    made = Rung("mma", testing.rows_padded, tensor=True, tile=32)
    made.limits.clear()
    made.limits.update(SMALL, features=made.features)
    return made
