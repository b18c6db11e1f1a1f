"""The tests that run GPU kernels in Numba's CUDA simulator: NUMBA_ENABLE_CUDASIM=1 before Python starts."""

import dataclasses
import os
from pathlib import Path
from unittest import mock

import pytest
from contracts import forward
from helpers.tile_rows import CHUNK, in_simulator, row as tile_row

from numba_flash import testing
from numba_flash.config.decode import DecodeConfig
from numba_flash.dispatch import backward as dispatch_backward, forward as dispatch_forward
from numba_flash.ptx.sim import now, wgmma as sim_wgmma
from numba_flash.ptx.sim.thread import driven
from numba_flash.select import backward_kernels as select_backward, backward_tiles, rungs, tiles
from numba_flash.select.tiles import PER_SCORE

HERE = Path(__file__).parent
ON = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") == "1"


# With which arguments the kernels behind the simplest one run tests of the contract that have many: each value of each
# argument once, but not all pairs. Pairs are tried on the simplest kernel here, and on every kernel on a GPU.
FEW = {
    "test_what_is_hidden_never_reaches_o": lambda value, **_: value != value or value == 6e4,
    "test_scores_of_any_size": lambda dtype, sign, **_: dtype == "float32" or sign > 0,
    "test_each_head_has_its_sink": lambda dtype, group, **_: dtype == "float16" or group == 3,
    "test_a_sink_of_any_size": lambda dtype, sink, **_: dtype == "float16" or sink == 0.5,
    "test_out_is_written_and_returned": lambda how, head_dim, **_: how == "sliced" or head_dim == 16,
    "test_every_function": lambda dtype, number, **_: dtype == "float32" or number == 0,
    "test_gradients_of_every_function": lambda dtype, number, **_: dtype == "float32" or number == 0,
    "test_dropout_in_every_dtype": lambda dtype, options, **_: dtype == "float16" or options,
    "test_gradients_with_dropout_in_every_dtype": lambda dtype, options, **_: dtype == "float16" or options,
    "test_gradients_of_aux_agree_with_the_oracle": lambda dtype, options, **_: dtype == "float16" or options,
}
SIMPLEST = dict(rung="v1", backward_rung="v2", aux_rung="v2")


def is_one_of_many(item):
    few, given = FEW.get(getattr(item, "originalname", None)), item.callspec.params if hasattr(item, "callspec") else {}
    kernel = next((name for name in SIMPLEST if name in given), None)
    return bool(few and kernel and given[kernel] != SIMPLEST[kernel] and not few(**given))


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            if not ON:
                item.add_marker(pytest.mark.skip(reason="the simulator is off: set NUMBA_ENABLE_CUDASIM=1"))
            elif is_one_of_many(item):
                item.add_marker(pytest.mark.skip(reason="this pair runs on the simplest kernel, and on a GPU"))


SMALL = dict(max_seqlen=40, max_batch=2, head_dims=(1, 7, 16, 32))  # every row is a thread, run by Python
TENSOR = SMALL | dict(dtypes=("float16", "bfloat16"), strange_strides=False, max_seqlen=80)  # over several tiles


def mma(head_dim, tile_m, warp_rows, q_registers=False, rescale_threshold=0, **when):
    sizes = dict(tile_m=tile_m, tile_n=32, warp_rows=warp_rows, q_registers=q_registers, blocks_per_sm=0)
    return tile_row(head_dim, **sizes, rescale_threshold=rescale_threshold, **when)


# Tiles on tensor cores: small, so that few keys make several, in warps of either kind. What the tables have besides is
# in test_tiles_of_the_table and, for gradients, in test_every_kind_of_row.
TILES = {
    "mma": (
        mma(64, 64, 32, q_registers=True, unread=True),
        mma(64, 32, 16, q_registers=True),
        mma(128, 64, 32, rescale_threshold=8, unread=True),
        mma(512, 32, 16),
    ),
    "mma_float32": (
        tile_row(512, tile_m=16, tile_n=16, warp_rows=16, column_groups=1, blocks_per_sm=0, rescale_threshold=8),
    ),
    "mma_float64": (
        tile_row(512, tile_m=16, tile_n=16, warp_rows=16, column_groups=1, blocks_per_sm=0, rescale_threshold=8),
    ),
    "wgmma": (
        tile_row(64, tile_m=128, tile_n=32, q_buffers=2, rescale_threshold=8),
        tile_row(256, tile_m=128, tile_n=32, q_buffers=1, rescale_threshold=8),
    ),
    "mma_dkdv": (
        tile_row(128, tile_m=16, tile_n=32, warp_rows=16, column_groups=1),
        tile_row(256, tile_m=16, tile_n=32, warp_rows=16, column_groups=1, apart=True),
    ),
    **{
        f"mma_{kernel}_{dtype}": (tile_row(256, tile_m=16, tile_n=16, warp_rows=16, column_groups=1, blocks_per_sm=0),)
        for kernel in ("dkdv", "dq")
        for dtype in ("float32", "float64")
    },
    "mma_dq": (tile_row(256, tile_m=32, tile_n=16, warp_rows=16, column_groups=1),),
}


@pytest.fixture(autouse=True, scope="session")
def small_tiles():
    tables = {name: of_gpus(name) + [in_simulator(row) for row in own] for name, own in TILES.items()}
    forward = {name: rows for name, rows in tables.items() if name in tiles.TABLES}
    backward = {name: rows for name, rows in tables.items() if name in backward_tiles.TABLES}
    small_chunks = mock.patch.object(DecodeConfig, "CHUNK", CHUNK)
    with small_chunks, mock.patch.dict(tiles.TABLES, forward), mock.patch.dict(backward_tiles.TABLES, backward):
        yield


def table_with(name):
    """The tables that have this one."""
    return tiles.TABLES if name in tiles.TABLES else backward_tiles.TABLES


def of_gpus(table):
    return [row for row in table_with(table)[table] if row.when.gpu != tiles.SIMULATOR]


@pytest.fixture
def tiles_of_gpus(monkeypatch, nothing_remembered):
    """The tables as they are for GPUs."""
    for name in TILES:
        monkeypatch.setitem(table_with(name), name, of_gpus(name))


@pytest.fixture
def nothing_remembered(monkeypatch):
    """For tests that change a table or the machine: what was decided is remembered by problem."""
    for module in (dispatch_forward, dispatch_backward):
        monkeypatch.setattr(module, "_plans", {})
    select_backward.configs_of.cache_clear()
    yield
    select_backward.configs_of.cache_clear()


@pytest.fixture
def slow_products(monkeypatch):
    """Others go on before a product is waited for: a place that was given back before is written while it is read."""
    together = sim_wgmma.together

    def late(instruction, *given):
        if instruction[0] == "wgmma.wait_group":
            for _ in range(3):
                yield from driven(now.current().turns.let_others_run(now.current(), None))
        return (yield from driven(together(instruction, *given)))

    monkeypatch.setattr(sim_wgmma, "together", late)


@pytest.fixture
def rows_for_every_kind(monkeypatch, nothing_remembered):
    """-> a function: gives wgmma's two backward kernels one row each, for whatever decides about single scores."""

    def use(dkdv, dq):
        for kernel, values in (("wgmma_dkdv", dkdv), ("wgmma_dq", dq)):
            sizes = dict(zip(("tile_m", "tile_n", "stages_a", "stages_b", "apart"), values, strict=False))
            row = in_simulator(tile_row(256, **sizes, per_score=PER_SCORE[-1]))
            monkeypatch.setitem(backward_tiles.TABLES, kernel, (row,))

    return use


def tensor(kernel):
    rung = forward.Rung(kernel, testing.rows_padded, tensor=True, tile=32, slow=True)
    return dataclasses.replace(rung, limits=TENSOR)


# Every attention kernel that is written for GPUs; wgmma, which takes longer, is in test_wgmma_forward.
@pytest.fixture(scope="session", params=["v1", "v2", "mma"])
def rung(request):
    if rungs.RUNGS[request.param].tensor_cores:
        return tensor(request.param)
    return forward.Rung(request.param, limits=SMALL, slow=request.param != SIMPLEST["rung"])
