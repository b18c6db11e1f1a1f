"""The part of gradients' contract that mma's kernels are run through in the simulator, in tiles of 32 x 16.

All of it takes minutes, and runs on a GPU.
"""

import numpy as np
import pytest
from contracts.backward import (  # noqa: F401
    Rung,
    incoming,
    test_a_key_of_weight_0_gets_no_gradient_from_a_nonfinite_row,
    test_a_kv_head_gets_the_sum_of_its_group,
    test_all_options_at_once,
    test_any_strides,
    test_head_dim_v_may_differ,
    test_lse_beyond_the_range_of_exp,
    test_many_tiles,
    test_nothing_is_defined,
    test_parts_of_the_keys,
    test_random_problems_agree_with_the_oracle,
    test_scale,
    test_what_is_not_wanted_changes_nothing,
    test_whole_numbers_come_out_exactly,
)
from contracts.functions import BY_PLACE
from helpers.tile_rows import row as tile_row

from numba_flash import testing
from numba_flash.select import backward_tiles


@pytest.fixture(scope="module")
def rung():
    made = Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)
    limits = dict(max_seqlen=32, max_batch=2, head_dims=(1, 7, 16, 32), dtypes=("float16", "bfloat16"))
    made.limits.clear()
    made.limits.update(limits, strange_strides=False, features=made.features)
    return made


def of_mma(tile_m, tile_n, warp_rows, in_registers, groups, stages, apart=False):
    sizes = dict(tile_m=tile_m, tile_n=tile_n, warp_rows=warp_rows, in_registers=in_registers)
    return tile_row(256, apart, **sizes, column_groups=groups, stages=stages)


def dkdv(tile_m, tile_n, warp_rows=32, in_registers=False, groups=1, stages=2, apart=False):
    return of_mma(tile_m, tile_n, warp_rows, in_registers, groups, stages, apart)


def dq(tile_m, tile_n, warp_rows=32, in_registers=False, groups=1, stages=2):
    return of_mma(tile_m, tile_n, warp_rows, in_registers, groups, stages)


# What else a row of the tables may say: two strips of rows a warp, fragments that stay in registers, warps that share
# rows, dK and dV apart, tiles that are no power of two, one stage whose halves are copied in turn.
ROWS = {
    "two strips": (dkdv(32, 64), dq(64, 32)),
    "in registers": (dkdv(32, 32, warp_rows=16, in_registers=True), dq(32, 32, warp_rows=16, in_registers=True)),
    "two groups": (dkdv(32, 64, groups=2), dq(64, 32, groups=2)),
    "four groups, in registers": (
        dkdv(64, 16, warp_rows=16, in_registers=True, groups=4),
        dq(16, 64, warp_rows=16, in_registers=True, groups=4),
    ),
    "apart": (dkdv(48, 32, warp_rows=16, apart=True), dq(32, 48, warp_rows=16)),
    "apart, in registers": (dkdv(16, 64, in_registers=True, apart=True), dq(64, 16, in_registers=True)),
    "one stage": (dkdv(32, 32, warp_rows=16, stages=1), dq(32, 32, warp_rows=16, stages=1)),
    "one stage, two groups": (dkdv(64, 32, groups=2, stages=1), dq(32, 64, groups=2, stages=1)),
    "one stage, apart": (
        dkdv(32, 32, warp_rows=16, stages=1, apart=True),
        dq(32, 48, warp_rows=16, in_registers=True, stages=1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(rung, how, monkeypatch, nothing_remembered):
    dkdv_row, dq_row = ROWS[how]
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dkdv", (dkdv_row,))
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dq", (dq_row,))
    # The smallest lengths by which dQ's blocks walk over three tiles, more than there are stages, and dK's and dV's
    # over masked, free and ragged ones. Several heads walk over theirs in the same way: the contract above has them.
    # head_dim is more than a panel where warps have parts of it.
    seqlen_q, seqlen_k = max(50, dkdv_row.tile["tile_m"] + 2), max(66, 2 * dq_row.tile["tile_n"] + 2)
    head_dim, head_dim_v = (67, 40) if dq_row.tile["column_groups"] > 1 else (19, 24)
    case = rung.problem(
        seqlen_q, seqlen_k, batch=1, heads=1, head_dim=head_dim, head_dim_v=head_dim_v, dtype="bfloat16"
    )
    rung.check(case, causal=True, softcap=2.0, alibi_slopes=np.array([0.5], np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_functions_in_every_kind_of_row(rung, how, monkeypatch, nothing_remembered):
    dkdv_row, dq_row = ROWS[how]
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dkdv", (dkdv_row,))
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dq", (dq_row,))
    seqlen_q, seqlen_k = max(40, dkdv_row.tile["tile_m"] + 2), max(40, dq_row.tile["tile_n"] + 2)
    head_dim, head_dim_v = (67, 40) if dq_row.tile["column_groups"] > 1 else (19, 24)
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=head_dim, head_dim_v=head_dim_v)
    rung.check(case, **BY_PLACE, causal=True, **(dict(dropout_p=0.2, seed=4) if "one stage" in how else {}))


@pytest.mark.slow
def test_warps_that_share_rows_recompute_them(rung, monkeypatch, nothing_remembered):
    dkdv_row, dq_row = ROWS["two groups"]
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dkdv", (dkdv_row,))
    monkeypatch.setitem(backward_tiles.TABLES, "mma_dq", (dq_row,))
    case = rung.problem(8, 36, batch=1, heads=1, head_dim=67)
    case.v[:, :, 34] = np.nan
    case.options |= dict(causal=True)
    gradients = rung.check(case, incoming(case))
    assert np.isnan(gradients.dq).any() and not np.isnan(gradients.dq).all()


# A key that some queries do not see and a query that does not see some keys, whole tiles of them and parts of tiles.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["k", "v", "q", "do"])
def test_nonfinite_rows_are_recomputed(rung, where):
    case = rung.problem(8, 36, batch=1, heads=1, head_dim=8)
    do, o, lse, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 5 if where in ("q", "do") else 34] = np.nan
    case.options |= dict(causal=True)
    _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in nonfinite) and not nonfinite[0].all()
