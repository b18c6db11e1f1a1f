"""mma's forward in the tiles that its table has for GPUs. The contract runs it in smaller ones (small_tiles)."""

import numpy as np
import pytest
from contracts import forward

from numba_flash import testing
from numba_flash.api import forward as api


@pytest.fixture
def rung(tiles_of_gpus):
    return forward.Rung("mma", testing.rows_padded, tensor=True, slow=True)


# Two tiles of queries by two of keys, the second of which are ragged: two strips of rows a warp with Q in registers,
# then from shared memory and with a maximum that may be behind, and one strip a warp where a mask is read.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "with_mask", "tile"),
    [(64, False, (128, 64, 32)), (72, False, (128, 64, 32)), (64, True, (64, 64, 16))],
)
def test_tiles_of_the_table(rung, head_dim, with_mask, tile):
    case = rung.problem(tile[0] + 5, 70, batch=1, heads=1, head_dim=head_dim, causal=True)
    if with_mask:
        case.options["mask"] = np.random.default_rng(0).random((tile[0] + 5, 70)) < 0.7
    config = api.prepare_call(case.q, case.k, case.v, dict(case.options, kernel="mma"))[1].choice.config
    assert (config.tile_m, config.tile_n, config.warp_rows) == tile
    rung.check(case)
