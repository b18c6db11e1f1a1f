"""What every backward begins with, lse and delta of each row, in every layout of dO and O, simulated."""

import dataclasses

import numpy as np
import pytest
from helpers.machines import empty
from helpers.simt_kernels import backward_problem

from numba_flash import arrays
from numba_flash.config.backward import PreprocessConfig
from numba_flash.config.simt_backward import DeltaConfig
from numba_flash.dispatch import launch
from numba_flash.machine.target import Target
from numba_flash.select import backward_shared

BATCH, HEADS, ROWS = 2, 3, 21
DTYPES = ("float16", "float32", "float64")
KINDS = dict(delta=DeltaConfig, preprocess=PreprocessConfig)


def laid_out(x, how):
    """The same numbers in other memory."""
    memory = dict(
        contiguous=lambda: np.empty(x.shape, x.dtype),
        heads_inside=lambda: np.empty((BATCH, ROWS, HEADS, x.shape[3]), x.dtype).transpose(0, 2, 1, 3),
        one_more_column=lambda: np.empty((*x.shape[:3], x.shape[3] + 1), x.dtype)[..., :-1],
        four_more_columns=lambda: np.empty((*x.shape[:3], x.shape[3] + 4), x.dtype)[..., :-4],
        columns_apart=lambda: np.empty((*x.shape[:3], 2 * x.shape[3]), x.dtype)[..., ::2],
        backwards=lambda: np.empty(x.shape, x.dtype)[:, :, ::-1, ::-1],
    )[how]()
    memory[...] = x
    return memory


def of_rows(do, o, lse, dlse, kernel, alignment=16, **fields):
    """-> (delta, lse) of every row, as the kernel makes them; lse is None where it makes none. And its Config."""
    target, dtype, head_dim = Target.of(None), do.dtype.name, do.shape[3]
    q = np.empty(do.shape, dtype)
    problem = backward_problem(
        do=do, q=q, k=q, v=q, o=o, lse=lse, dlse=dlse, dtype=dtype, alignment=alignment, head_dim=head_dim
    )
    made = dataclasses.replace(backward_shared.first(KINDS[kernel], problem, target), **fields)
    workspace = {name: np.full(*given) for name, given in _filled(made.workspace(problem)).items()}
    given = dict(do=do, o=o, lse=lse, dlse=dlse, turns=None) | workspace
    read = [None if given[name] is None else arrays.read(name, given[name]) for name in made.parameters.arrays]
    launch.on_gpu(made, problem, target).run(read, 0)
    if kernel == "delta":
        return workspace["delta"], None, made
    blocks = workspace["lse_delta"].reshape(BATCH, HEADS, -1, 2, 16)
    place = np.array([((n & 6) << 1) + ((n & 8) >> 2) + (n & 1) for n in range(16)])
    lse_of, minus_delta = (blocks[..., i, place].reshape(BATCH, HEADS, -1) for i in (0, 1))
    assert np.isposinf(lse_of[..., ROWS:]).all() and not minus_delta[..., ROWS:].any(), "queries that do not exist"
    return -minus_delta[..., :ROWS], lse_of[..., :ROWS], made


def _filled(workspace):
    return {name: (shape, np.nan, dtype) for name, (shape, dtype) in workspace.items()}


def numbers(dtype, head_dim, seed=0):
    made = np.random.default_rng(seed)
    do, o = (made.standard_normal((BATCH, HEADS, ROWS, head_dim)).astype(dtype) for _ in range(2))
    lse, dlse = (made.standard_normal((BATCH, HEADS, ROWS)).astype(np.result_type(dtype, np.float32)) for _ in range(2))
    return do, o, lse, dlse


KERNELS = [("preprocess", "float16"), *[("delta", dtype) for dtype in DTYPES]]


@pytest.mark.parametrize("head_dim", [1, 3, 8, 24, 40, 64, 100, 300])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_delta_of_every_size_of_rows(kernel, dtype, head_dim):
    do, o, lse, dlse = numbers(dtype, head_dim)
    lse[0, 0, :3] = -np.inf
    found, found_lse, _ = of_rows(do, o, lse, dlse, kernel)
    exact = (do.astype(np.float64) * o).sum(-1) - dlse
    eps = np.finfo(found.dtype).eps
    assert (abs(found - exact) <= 2 * head_dim * eps * (abs(do.astype(np.float64) * o).sum(-1) + abs(dlse))).all()
    if kernel == "preprocess":
        lse = np.where(np.isneginf(lse), np.inf, lse)
        assert np.allclose(found_lse, lse * np.float32(np.log2(np.e)), rtol=1e-6)


LAYOUTS = ("contiguous", "heads_inside", "one_more_column", "four_more_columns", "columns_apart", "backwards")


@pytest.mark.parametrize("head_dim", [6, 40])
@pytest.mark.parametrize(("kernel", "dtype"), KERNELS)
def test_delta_has_the_same_bits_in_every_layout(kernel, dtype, head_dim):
    do, o, lse, dlse = numbers(dtype, head_dim)
    plain, _, config = of_rows(do, o, lse, dlse, kernel)
    assert (of_rows(do, o, lse, dlse, kernel, most_rows=1)[0] == plain).all(), "a row at a time"
    loads = {config.load_bytes}
    for how in LAYOUTS:
        found, _, config = of_rows(laid_out(do, how), laid_out(o, "contiguous"), lse, dlse, kernel)
        assert (found == plain).all(), how
        loads.add(config.load_bytes)
    assert len(loads) > 1 and min(loads) == np.dtype(dtype).itemsize


def test_loads_are_as_wide_as_all_rows_allow():
    def loads(head_dim, dtype="float16", alignment=16, **given):
        problem = backward_problem(head_dim, dtype=dtype, alignment=alignment, **given)
        return backward_shared.first(DeltaConfig, problem, Target.of(None)).load_bytes

    assert [loads(n) for n in (64, 60, 59, 62)] == [16, 8, 2, 4]
    assert [loads(n, "float32") for n in (24, 50, 3)] == [16, 8, 4] and loads(3, "float64") == 8
    assert loads(64, alignment=4) == 4
    assert loads(64, do=empty(1, 2, 300, 64, dtype="float16", strides=(40000, 20000, 66, 1))) == 4
    assert loads(64, o=empty(1, 2, 300, 64, dtype="float16", strides=(40000, 40000, 128, 2))) == 2
