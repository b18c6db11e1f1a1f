"""The part of the contract that mma is run through in the simulator in float32 and float64; all of it runs on a GPU."""

import dataclasses

import numpy as np
import pytest
from contracts import forward
from contracts.forward import (  # noqa: F401
    test_any_strides,
    test_head_dim_v_may_differ,
    test_maxima_that_move,
    test_nan_in_q_stays_in_its_row,
    test_nothing_is_defined,
    test_nothing_is_written_around_out,
    test_query_head_h_reads_kv_head_h_over_group,
    test_scale,
    test_scores_of_minus_infinity_in_whole_tiles,
)
from contracts.fp32_fp64 import (  # noqa: F401
    float32,
    test_a_large_bias_is_exact,
    test_all_options_and_a_group_in_one_tile,
    test_long_sums_do_not_drift,
    test_nan_behind_a_mask,
    test_numbers_of_any_size,
    test_terms_that_cancel,
    test_values_near_the_largest_number,
    test_what_has_no_small_part,
    test_what_is_read_or_asked_for_each_score,
)
from helpers.tile_rows import row as tile_row

from numba_flash import testing
from numba_flash.api import forward as api
from numba_flash.dispatch import forward as dispatch
from numba_flash.machine.target import Target
from numba_flash.select import tiles


@pytest.fixture(scope="session", params=["float32", "float64"])
def rung(request):
    return forward.Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual=request.param)


def of_mma(head_dim, tile_m, tile_n, warp_rows, column_groups, **more):
    sizes = dict(tile_m=tile_m, tile_n=tile_n, warp_rows=warp_rows, column_groups=column_groups)
    return tile_row(head_dim, **sizes, blocks_per_sm=1, rescale_threshold=8, **more)


# Warps of 32 rows; products of 8 rows, as sm_80 has them; columns of O that two blocks have between them, or two warps.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "row", "cc", "head_dim_v"),
    [
        ("float32", (64, 32, 32, 1), (9, 0), 64),
        ("float64", (32, 16, 32, 1), (8, 0), 24),
        ("float64", (16, 32, 16, 1), (9, 0), 136),
        ("float64", (32, 16, 16, 2), (9, 0), 136),
        ("float64", (32, 32, 16, 2), (9, 0), 136),
        ("float32", (32, 32, 32, 2), (9, 0), 80),
    ],
)
def test_other_tiles(dtype, row, cc, head_dim_v, monkeypatch, nothing_remembered):
    machine = dataclasses.replace(Target.of(None), cc=cc)
    monkeypatch.setattr(dispatch.Target, "of", lambda device: machine)
    monkeypatch.setitem(tiles.TABLES, f"mma_{dtype}", (of_mma(512, *row),))
    rung = forward.Rung("mma", testing.rows_padded, tensor=True, usual=dtype)
    case = rung.problem(34, 50, batch=1, heads=1, head_dim=24, head_dim_v=head_dim_v)
    config = api.prepare_call(case.q, case.k, case.v, dict(kernel="mma"))[1].choice.config
    assert (config.warp_rows, config.large_f64) == (row[2], dtype == "float64" and cc == (9, 0))
    assert config.v_parts == (2 if head_dim_v > 128 and row[3] == 1 else 1)
    rung.check(case, causal=True)
    few = rung.problem(5, 50, batch=1, heads=1, head_dim=24, head_dim_v=head_dim_v)
    few.v[0, 0, 39, 1] = np.inf  # in one half of the columns, and every row is computed again
    rung.check(few)
    # Of tiles that warps share, too: which row and which column a score is of.
    table = np.random.default_rng(3).standard_normal((34, 50), dtype=np.float32)
    read = rung.problem(34, 50, batch=1, heads=1, head_dim=24, head_dim_v=head_dim_v, q_offset=0)
    rung.check(
        read, score_mod=lambda s, b, h, i, j, table: s + table[i, j], aux=(table,), bias=-table, mask=table < 1.5
    )
