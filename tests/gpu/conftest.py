"""The tests that need an NVIDIA GPU; without one they are skipped, and say what is missing."""

import importlib.util
import os
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
from contracts import backward, forward

import numba_flash
from numba_flash import testing
from numba_flash.dispatch import forward as dispatch
from numba_flash.select import forward_kernels as select, rungs

HERE = Path(__file__).parent


def missing():
    """What stands in the way, or None."""
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1":
        return "the simulator is on: unset NUMBA_ENABLE_CUDASIM"
    if importlib.util.find_spec("cupy") is None:
        return "needs CuPy: pip install 'numba-flash[cu13]'"
    from numba_flash.machine import toolchain

    reason = toolchain.unusable()
    return None if reason is None else f"needs a GPU: {reason}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Where there is no GPU, one test says so for all of them: a line each, and a process each, would tell no more."""
    mine = [item for item in items if HERE in item.path.parents]
    reason = missing() if mine else None
    if reason is None:
        return
    first, *others = mine
    first.add_marker(pytest.mark.skip(reason=f"{reason} (and {len(others)} other tests with it)"))
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def to_cupy(x):
    """The same elements on the GPU; unusual strides are kept by copying all the memory they span."""
    import cupy

    if x.size == 0 or x.ndim == 0 or x.flags.c_contiguous:
        return cupy.array(x)
    lowest = x[tuple(slice(None, None, -1 if s < 0 else 1) for s in x.strides)]
    span = 1 + sum(abs(s) // x.itemsize * (n - 1) for s, n in zip(x.strides, x.shape, strict=True))
    memory = cupy.asarray(np.lib.stride_tricks.as_strided(lowest, (span,), (x.itemsize,)).copy())
    start = -sum(min(0, s) * (n - 1) for s, n in zip(x.strides, x.shape, strict=True))
    return cupy.ndarray(x.shape, x.dtype, memory.data + start, x.strides)


def to_tensor_cores(x):
    """Likewise, with rows that begin at multiples of 16 bytes."""
    return to_cupy(testing.rows_padded(x))


SMALL = dict(max_seqlen=40, max_batch=2, head_dims=(1, 7, 16, 32))
# A kernel on tensor cores takes seconds to compile: few of them, for many shapes. scripts/gpu_check has all options.
TENSOR = dict(
    dtypes=("float16",), features=("causal", "window", "seqlens_k"), head_dims=(40,), max_seqlen=300,
    strange_strides=False,
)  # fmt: skip


class InLargeTiles(forward.Rung):
    """wgmma with as many query rows a tile as its table has, which it takes of itself where there is much to do."""

    plans: ClassVar[dict] = {}

    def attention(self, *operands, **arguments):
        costs = {rows: 1 / rows**4 for rows in select.TILE_COST}
        with mock.patch.object(select, "TILE_COST", costs), mock.patch.object(dispatch, "_plans", self.plans):
            return super().attention(*operands, **arguments)


# Every attention kernel that is written for GPUs; a kernel for another GPU is skipped.
@pytest.fixture(
    scope="session",
    params=[
        *(name for name in rungs.RUNGS if name not in ("reference", "cpu")),
        "wgmma in large tiles", "wgmma in float32", "mma in float32", "mma in float64",
    ],
)  # fmt: skip
def rung(request):
    name, _, how = request.param.partition(" in ")
    if not rungs.RUNGS[name].tensor_cores:
        return forward.Rung(name, to_cupy, lambda x: x.get(), SMALL)
    try:
        usual = how if how.startswith("float") else "float16"
        numba_flash.explain(*[to_cupy(np.zeros((1, 1, 8, 8), usual))] * 3, kernel=name)
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    made, limits = InLargeTiles if how == "large tiles" else forward.Rung, TENSOR | dict(dtypes=(usual,))
    return made(name, to_tensor_cores, lambda x: x.get(), limits, tensor=True, usual=usual, tile=64)


# Likewise for gradients; a kernel for another GPU is skipped.
@pytest.fixture(
    scope="session",
    params=[
        *(name for name, rung in rungs.RUNGS.items() if rung.has_backward and not rung.on_host),
        "mma in float32", "mma in float64",
    ],
)  # fmt: skip
def backward_rung(request):
    name, _, usual = request.param.partition(" in ")
    if not rungs.RUNGS[name].tensor_cores:
        return backward.Rung(name, to_cupy, lambda x: x.get(), SMALL)
    limits = TENSOR | dict(dtypes=(usual or "float16",))
    rung = backward.Rung(name, to_tensor_cores, lambda x: x.get(), limits, tensor=True, tile=64, usual=usual)
    try:
        rung(rung.problem(head_dim=8))
    except NotImplementedError as refused:
        pytest.skip(str(refused))
    return rung
