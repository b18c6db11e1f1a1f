"""The part of gradients' contract that mma is run through in the simulator in float32 and float64; all of it runs on a
GPU."""

import numpy as np
import pytest
from contract_backward import (  # noqa: F401
    Rung,
    incoming,
    test_a_key_without_weight_gets_nothing_from_a_row_that_is_struck,
    test_a_kv_head_gets_the_sum_of_its_group,
    test_any_strides,
    test_head_dim_v_may_differ,
    test_nothing_is_defined,
    test_scale,
    test_what_is_not_wanted_changes_nothing,
)

from numba_flash import testing
from numba_flash.select import tiles


@pytest.fixture(scope="module", params=["float32", "float64"])
def rung(request):
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual=request.param)


def test_all_options(rung):
    case = rung.problem(40, 50, batch=2, heads=4, heads_kv=2, head_dim=20, head_dim_v=37)
    rung.check(
        case, causal=True, window=(30, 3), seqlens_k=np.array([50, 31], np.int32), softcap=3.0, scale=0.7,
        q_offset=np.array([12, -2], np.int32), alibi_slopes=np.linspace(0.1, 0.8, 4).astype(np.float32),
        dropout_p=0.3, seed=11,
    )  # fmt: skip


# Warps of 32 rows, two warps with columns of their own, dK and dV apart, and how many rows a block walks over.
ROWS = {
    "two strips": (("float32", 32, 32, 32, 1), {}),
    "two groups": (("float32", 32, 32, 16, 2), {}),
    "two groups in float64": (("float64", 16, 16, 16, 2), {}),
    "apart": (("float64", 16, 32, 16, 1), dict(apart=True)),
    "64 rows": (("float32", 16, 64, 16, 1), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(how, monkeypatch, nothing_remembered):
    (dtype, own, other, warp_rows, groups), more = ROWS[how]
    row = tiles.WideBackward(256, own, other, warp_rows, groups, blocks_per_sm=0, **more)
    for kernel in ("mma_dkdv", "mma_dq"):
        monkeypatch.setitem(tiles.TABLES, f"{kernel}_{dtype}", (row,))
    rung = Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True, usual=dtype)
    case = rung.problem(34, 50, batch=1, heads=1, head_dim=24, head_dim_v=40)
    rung.check(case, causal=True)


# A number that is no number in a row of dO or V makes NaN of every dS of its tile. Keys and queries that have no part
# in it are computed again without it.
@pytest.mark.parametrize("where", ["do", "v", "k"])
def test_what_is_strange_stays_where_it_is_seen(rung, where):
    case = rung.problem(20, 20, batch=1, heads=1, head_dim=8, causal=True)
    do, o, lse, dlse = incoming(case, 1)
    (do if where == "do" else getattr(case, where))[0, 0, 12, 3] = np.nan
    found = rung(case, (do, o, lse, dlse))
    clean = rung.problem(20, 20, batch=1, heads=1, head_dim=8, causal=True)
    expected = rung(clean, incoming(clean, 1))
    if where == "do":  # a query's: keys behind it do not see it
        assert np.isfinite(found.dk[0, 0, 13:]).all() and np.allclose(found.dk[0, 0, 13:], expected.dk[0, 0, 13:])
    else:  # a key's: queries before it do not see it
        assert np.isfinite(found.dq[0, 0, :12]).all() and np.allclose(found.dq[0, 0, :12], expected.dq[0, 0, :12])
