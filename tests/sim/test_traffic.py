"""debug.traffic: the bytes that kernels move are those that their loops say."""

import importlib
from importlib import machinery, util
from pathlib import Path

import numpy as np
import pytest
from numba import cuda

from lessons import NAMES
from numba_flash.debug import traffic
from numba_flash.ptx.sim.launch import Pointer


def script():
    """scripts/why, whose formulas for bytes are those of docs/why.md."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "why"
    made = util.module_from_spec(util.spec_from_loader("why", machinery.SourceFileLoader("why", str(path))))
    made.__loader__.exec_module(made)
    return made


moved = script().moved  # (kernel, n, d, bytes of an element, tile) -> bytes of global memory read and written


def inputs(queries, keys, head_dim, dtype="float32", heads=1):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, heads, n, head_dim)).astype(dtype) for n in (queries, keys, keys)]


@pytest.mark.parametrize("tile", [(16, 16), (32, 8)], ids=str)
def test_v1_and_v2_move_what_their_loops_say(tile):
    n, d = 32, 16
    v1, v2 = (traffic(*inputs(n, n, d), kernel=kernel, tile=tile) for kernel in ("v1", "v2"))
    # v2 loads Q once, and K and V for each query tile. v1 loads K and V once, and for each key tile Q, O, l and m.
    assert (v2.global_read, v2.global_written) == (4 * n * d * (1 + 2 * (n // tile[0])), 4 * n * d)
    for found in (v1, v2):
        assert (found.global_read, found.global_written) == moved(found.kernel, n, d, 4, tile)
    assert v1.flops == v2.flops == 4 * n * n * d and v1.tensor_flops == 0


def test_mma_moves_as_many_bytes_as_v2_with_its_tiles():
    n, d = 128, 64
    mma = traffic(*inputs(n, n, d, "float16"), kernel="mma")
    assert mma.tensor_flops == mma.flops == 4 * n * n * d
    tile_m = int(mma.about.rpartition("tiles of ")[2].split()[0])
    assert (mma.global_read, mma.global_written) == moved("mma", n, d, 2, (tile_m, 64))


def test_wgmma_is_counted_with_tma():
    """Its blocks load the first tiles of a head once more behind their last work, and drop them."""
    n, d = 128, 64
    found = traffic(*inputs(n, n, d, "float16"), kernel="wgmma")
    least = 2 * n * d * 3
    assert least <= found.global_read <= 4 * least and 2 * n * d <= found.global_written <= 2 * n * d + 64
    assert found.flops <= found.tensor_flops <= 2 * found.flops and found.shared_read > found.global_read


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_lesson_is_counted(name):
    lesson = importlib.import_module(f"lessons.{name}").attention
    n, d = 128, 64
    found = traffic(*inputs(n, n, d, "float16"), kernel=lesson)
    tiles_q = n // lesson.tile_m
    assert (found.global_read, found.global_written) == (2 * n * d * (1 + 2 * tiles_q), 2 * n * d)
    assert found.tensor_flops == found.flops
    if name in NAMES[4:]:  # scores and weights are in registers
        assert found.shared_written == found.global_read
    if name == "mma_4_registers":  # a warp's ldmatrix of 512 bytes for a pair of tiles: Q 4, K and V 16 each
        assert found.shared_read == (4 + 16 + 16) * 512 * 4 * tiles_q * (n // 64)


@cuda.jit
def scaled(x, y):
    """y = 2 x, by way of shared memory."""
    i = cuda.grid(1)
    tile = cuda.shared.array(8, np.float32)
    halves = cuda.shared.array(8, np.float16)
    tile[cuda.threadIdx.x] = x[i]
    halves[cuda.threadIdx.x] = x[i]
    cuda.syncthreads()
    if i < y.shape[0]:
        y[i] = tile[cuda.threadIdx.x] + halves[cuda.threadIdx.x]


def test_a_kernel_of_the_reader_s_own_is_counted():
    def launch(q, k, v):
        scaled[2, 8](q.reshape(-1), k.reshape(-1))

    q, k, v = inputs(4, 4, 4)
    found = traffic(q, k, v, kernel=launch)
    assert (found.global_read, found.global_written) == (2 * 16 * 4, 16 * 4)
    assert (found.shared_read, found.shared_written) == (16 * 6, 16 * 6)
    np.testing.assert_allclose(k, 2 * q, rtol=1e-3)
    assert found.kernel == "launch" and "global memory" in repr(found) and found.intensity == found.flops / 192


def test_nothing_is_counted_afterwards():
    before = Pointer.__getitem__
    traffic(*inputs(4, 4, 4), tile=(16, 16))
    assert Pointer.__getitem__ is before


def test_what_it_does_not_take():
    arrays = inputs(4, 4, 4)
    with pytest.raises(ValueError, match="kernel must be one of v1, v2, mma, wgmma, or a function that launches"):
        traffic(*arrays, kernel="cpu")
    with pytest.raises(NotImplementedError, match="tile= is for kernel='v1' and 'v2'"):
        traffic(*arrays, kernel="mma", tile=(16, 16))
