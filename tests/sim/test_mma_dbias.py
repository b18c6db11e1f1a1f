"""The gradient of bias by mma_dbias, simulated."""

import numpy as np
import pytest
from contracts import dbias, suite
from contracts.backward import Rung
from helpers.machines import empty
from helpers.simt_kernels import backward_problem

from numba_flash import arrays, testing
from numba_flash.dispatch import launch
from numba_flash.machine.target import Target
from numba_flash.select.backward_kernels import configs_of

TestDbias = suite(dbias)


@pytest.fixture(scope="module")
def dbias_rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)


# How many blocks share a sum: fewer than a thread loads at a time, more, and many threads for an element.
@pytest.mark.parametrize(("batch", "splits"), [(8, 2), (100, 25), (512, 128), (2100, 525)])
@pytest.mark.parametrize(("dtype", "given"), [("float16", "float16"), ("float64", "float64")])
def test_sums_of_blocks_are_added_up(batch, splits, dtype, given):
    rows, keys, target = 3, 5, Target.of(None)
    splits = min(splits, 396 if dtype == "float16" else 1024)
    given_arrays = {
        name: empty(batch, 1, n, 8, dtype=dtype) for name, n in dict(do=rows, q=rows, k=keys, v=keys, o=rows).items()
    }
    lse = empty(batch, 1, rows, dtype="float64" if dtype == "float64" else "float32")
    bias = np.empty((rows, keys), given)
    problem = backward_problem(8, dtype=dtype, wanted=("dbias",), lse=lse, bias=bias, **given_arrays)
    config = next(config for config in configs_of("v2", problem, target) if config.kernel == "dbias_sum")
    assert problem.dbias_splits == splits <= config.splits
    ((shape, kind),) = config.workspace(problem).values()
    sums = np.random.default_rng(6).standard_normal(shape).astype(kind)
    found = np.full_like(bias, np.nan)
    launch.on_gpu(config, problem, target).run([arrays.read("dbias_sums", sums), arrays.read("dbias", found)], 0)
    exact = sums.reshape(splits, rows, keys).astype(np.float64).sum(0)
    assert np.allclose(found, exact, atol=splits * 8 * np.finfo(kind).eps, rtol=2 * np.finfo(given).eps)
