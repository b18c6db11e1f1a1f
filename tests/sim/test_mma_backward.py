"""The part of gradients' contract that mma's kernels are run through in the simulator, in tiles of 32 x 32.

All of it takes minutes, and runs on a GPU.
"""

import numpy as np
import pytest
from contract_backward import (  # noqa: F401
    Rung,
    incoming,
    test_a_key_without_weight_gets_nothing_from_a_row_that_is_struck,
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

from numba_flash import testing
from numba_flash.select import backward as select_backward


@pytest.fixture(scope="module")
def rung():
    made = Rung("mma", testing.rows_padded, tensor=True, tile=32)
    limits = dict(max_seqlen=48, max_batch=2, head_dims=(1, 7, 16, 32), dtypes=("float16", "bfloat16"))
    made.limits.clear()
    made.limits.update(limits, strange_strides=False, features=made.features)
    return made


# What else a row of the tables may say: two strips of rows a warp, fragments that stay in registers, warps that share
# rows, dK and dV apart, tiles that are no power of two, one stage whose halves are copied in turn.
ROWS = {
    "two strips": ((32, 64, 32, False, 0, 1, 2), (64, 32, 32, False, 0, 1, 2)),
    "in registers": ((32, 32, 16, True, 0, 1, 2), (32, 32, 16, True, 0, 1, 2)),
    "two groups": ((32, 64, 32, False, 0, 2, 2), (64, 32, 32, False, 0, 2, 2)),
    "four groups, in registers": ((64, 16, 16, True, 0, 4, 2), (16, 64, 16, True, 0, 4, 2)),
    "apart": ((48, 32, 16, False, 0, 0, 2), (32, 48, 16, False, 0, 1, 2)),
    "apart, in registers": ((16, 64, 32, True, 0, 0, 2), (64, 16, 32, True, 0, 1, 2)),
    "one stage": ((32, 32, 16, False, 0, 1, 1), (32, 32, 16, False, 0, 1, 1)),
    "one stage, two groups": ((64, 32, 32, False, 0, 2, 1), (32, 64, 32, False, 0, 2, 1)),
    "one stage, apart": ((32, 32, 16, False, 0, 0, 1), (32, 48, 16, True, 0, 1, 1)),
}


@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(rung, how, monkeypatch):
    dkdv, dq = ROWS[how]
    monkeypatch.setattr(select_backward, "MMA_SIMULATOR_DKDV_TILES", ((256, False, *dkdv),))
    monkeypatch.setattr(select_backward, "MMA_SIMULATOR_DQ_TILES", ((256, False, *dq),))
    # The smallest lengths by which dQ's blocks walk over three tiles, more than there are stages, and dK's and dV's
    # over masked, free and ragged ones. Several heads walk over theirs in the same way: the contract above has them.
    # head_dim 67, more than a panel, says that nobody else has this problem: what was decided is remembered by problem.
    case = rung.problem(66, max(98, 2 * dq[1] + 2), batch=1, heads=1, head_dim=67, head_dim_v=40, dtype="bfloat16")
    rung.check(case, causal=True, softcap=2.0, alibi_slopes=np.array([0.5], np.float32))


def test_warps_that_share_rows_recompute_them_once(rung, monkeypatch):
    dkdv, dq = ROWS["two groups"]
    monkeypatch.setattr(select_backward, "MMA_SIMULATOR_DKDV_TILES", ((256, False, *dkdv),))
    monkeypatch.setattr(select_backward, "MMA_SIMULATOR_DQ_TILES", ((256, False, *dq),))
    case = rung.problem(24, 40, batch=1, heads=1, head_dim=75)
    case.v[:, :, 30] = np.nan
    case.options |= dict(causal=True)
    gradients = rung.check(case, incoming(case))
    assert np.isnan(gradients.dq).any() and not np.isnan(gradients.dq).all()


# A key that some queries do not see and a query that does not see some keys, whole tiles of them and parts of tiles.
@pytest.mark.parametrize("where", ["k", "v", "q", "do"])
def test_rows_that_meet_nan_are_computed_again(rung, where):
    case = rung.problem(24, 40, batch=1, heads=1, head_dim=8)
    do, o, lse, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 20 if where in ("q", "do") else 30] = np.nan
    case.options |= dict(causal=True)
    _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    struck = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in struck) and not struck[0].all()
