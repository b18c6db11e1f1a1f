"""score_mod and mask_mod on the GPU kernels, simulated."""

import numpy as np
import pytest
from contracts import backward, forward, functions, suite

from numba_flash import testing
from numba_flash.select import rungs

TestFunctions = suite(functions)

TENSOR = dict(dtypes=("float16", "bfloat16"), strange_strides=False)
SMALL = dict(max_seqlen=36, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a thread, run by Python


@pytest.fixture(scope="session", params=["v1", "v2", "mma", "wgmma"])
def rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return forward.Rung(request.param, testing.rows_padded, tensor=True, tile=32, slow=True, limits=TENSOR)
    return forward.Rung(request.param, limits=SMALL)


@pytest.fixture(scope="session", params=["v2", "mma"])
def backward_rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return backward.Rung(request.param, testing.rows_padded, tensor=True, slow=True, limits=TENSOR)
    return backward.Rung(request.param, limits=SMALL)


# What says most about a fragment, which takes the simulator seconds: positions, arrays, masks, rows computed again.
ON_FRAGMENTS = (
    "test_a_function_is_the_option_that_it_describes", "test_what_mask_mod_hides_never_reaches_o",
    "test_arrays_without_dimensions_and_parts_of_arrays", "test_documents_are_separate_calls",
    "test_a_row_that_mask_mod_empties_is_zero", "test_gradients_of_a_function_are_those_of_the_option",
    "test_gradients_of_a_score_of_its_own", "test_q_index_is", "test_reads_outside", "test_gradients_by_the_row",
    "test_a_row_that_mask_mod_empties_gets_no_gradient",
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_seconds(request):
    """Rungs on tensor cores run some of the tests here, and all of them on a GPU."""
    for name in {"rung", "backward_rung"} & set(request.fixturenames):
        if request.getfixturevalue(name).slow and not request.node.name.startswith(ON_FRAGMENTS):
            pytest.skip("minutes in the simulator; runs on a GPU")


def test_reads_outside_an_array_raise_in_a_kernel(rung):
    """Those that the shapes do not tell of: they depend on a decision."""

    def read(s, b, h, i, j, x):
        return s + x[j] if j > 0 else s

    line = read.__code__.co_firstlineno + 1
    case = rung.problem(3, 6, batch=1, heads=1, score_mod=read, aux=(np.zeros(5, np.float32),))
    with pytest.raises(IndexError, match=rf"read \(.*, line {line}\): .*size 5.*k_pos 5"):
        rung(case)
