"""Gradients in float32 with head_dim above 128 in the simulator: two blocks have half of the columns each."""

import numpy as np
import pytest
from contracts.backward import Rung, incoming, same
from helpers.tile_rows import row as tile_row

from numba_flash import testing
from numba_flash.kernels.recompute import keys as recompute_keys, queries as recompute_queries
from numba_flash.select import backward_tiles as tiles


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True, usual="float32")


# Halves of one panel and of two, of whole panels and less, of as many columns and fewer; none in the second. Two and
# three steps of the walk, so that places change, and mbarriers that are there twice begin again.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "options"),
    [
        (70, 40, 129, 129, dict(causal=True)),
        pytest.param(70, 40, 24, 160, {}, marks=pytest.mark.slow),
        pytest.param(40, 40, 256, 256, {}, marks=pytest.mark.slow),
        pytest.param(80, 40, 72, 255, dict(causal=True, q_offset=-45), marks=pytest.mark.slow),
        pytest.param(40, 90, 192, 24, dict(window=(20, 9), softcap=2.0), marks=pytest.mark.slow),
    ],
    ids=["causal", "panels of b alone", "256", "queries without keys", "window"],
)  # fmt: skip
def test_halves_of_columns(rung, seqlen_q, seqlen_k, head_dim, head_dim_v, options):
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=head_dim, head_dim_v=head_dim_v)
    rung.check(case, **options)


@pytest.mark.slow
def test_all_options(rung):
    case = rung.problem(20, 40, batch=1, heads=2, heads_kv=1, head_dim=136, head_dim_v=37)
    rung.check(
        case, causal=True, window=(30, 3), seqlens_k=np.array([31], np.int32), softcap=3.0, scale=0.7,
        q_offset=np.array([-2], np.int32), alibi_slopes=np.array([0.1, 0.8], np.float32),
        sinks=np.array([-1.0, 2.0], np.float32),
    )  # fmt: skip


@pytest.mark.slow
def test_what_is_read_for_each_score(rung):
    rng = np.random.default_rng(4)
    case = rung.problem(20, 70, batch=1, heads=1, head_dim=136, head_dim_v=20)
    rung.check(case, bias=rng.standard_normal((20, 70), dtype=np.float32), mask=rng.random((20, 70)) < 0.6)


# A block of either kernel walks over three tiles, so that its one place of each kind is used again.
@pytest.mark.slow
@pytest.mark.parametrize("rows", [48, 64, 16])
def test_every_kind_of_row(rung, rows, monkeypatch, nothing_remembered):
    dkdv, dq = (tile_row(256, tile_m=m, tile_n=n, stages_a=1, stages_b=1) for m, n in ((rows, 64), (64, rows)))
    monkeypatch.setitem(tiles.TABLES, "wgmma_dkdv_float32", (dkdv,))
    monkeypatch.setitem(tiles.TABLES, "wgmma_dq_float32", (dq,))
    for wanted, seqlens in ((("dk", "dv"), (2 * rows + 2, 20)), (("dq",), (20, 2 * rows + 2))):
        case = rung.problem(*seqlens, batch=1, heads=1, head_dim=136, head_dim_v=24)
        rung.check(case, wanted=wanted, window=(2 * rows, 2 * rows - 5), q_offset=3)


@pytest.fixture(scope="module")
def all_at_once(rung):
    """(problem, what comes in, all its gradients)"""
    case = rung.problem(20, 70, batch=1, heads=1, head_dim=136, head_dim_v=24, causal=True)
    given = incoming(case)
    return case, given, rung(case, given)


@pytest.mark.parametrize("wanted", [("dk",), ("dv",), ("dq",)], ids="-".join)
def test_each_gradient_alone_has_the_same_bits(rung, wanted, all_at_once):
    case, given, together = all_at_once
    alone = rung(case, given, wanted)
    assert same([getattr(alone, name) for name in wanted], [getattr(together, name) for name in wanted])


# dV alone has one consumer, which frees both kinds of tiles.
@pytest.mark.parametrize("wanted", [("dq", "dk", "dv"), ("dv",)], ids="-".join)
def test_products_may_take_long(rung, wanted, slow_products):
    """Nobody gives a panel back before the product that reads it is done: the producer writes there at once."""
    case = rung.problem(40, 40, batch=1, heads=1, head_dim=136, head_dim_v=136)
    gradients = rung(case, incoming(case), wanted)
    assert all(np.isfinite(getattr(gradients, name)).all() for name in wanted)


def test_keys_and_columns_past_the_end_may_be_anything(rung, monkeypatch):
    """Nor is any row computed again, which would come out right, but slowly."""

    def repair(*_):
        raise AssertionError("a row was not finite: something past the end was multiplied by 0")

    monkeypatch.setattr(recompute_queries, "make", lambda *_: repair)
    monkeypatch.setattr(recompute_keys, "make", lambda *_: repair)
    case = rung.problem(24, 90, batch=1, heads=1, head_dim=131, head_dim_v=9)
    case.k[:, :, 37:], case.v[:, :, 37:] = np.inf, np.nan
    gradients = rung.check(case, seqlens_k=np.array([37], np.int32), q_offset=0)
    assert all(np.isfinite(x).all() for x in gradients[:3])


# In a column of the first block, and of the second; what they make not finite is not finite in one block, or in both.
@pytest.mark.parametrize(("where", "column"), [("k", 5), ("v", 130), ("do", 5), ("q", 130)])
def test_rows_that_are_nonfinite_in_one_half_are_recomputed_as_a_whole(rung, where, column):
    case = rung.problem(8, 24, batch=1, heads=1, head_dim=136, head_dim_v=136)
    do, _, _, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 5 if where in ("q", "do") else 20, column] = np.nan
    case.options |= dict(causal=True)
    _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in nonfinite) and not nonfinite[0].all()


def test_products_are_as_exact_as_float32(rung):
    """Without the other block's half S is another, and with two parts instead of three dQ, dK and dV are 2^8 units
    away."""
    case = rung.problem(64, 64, batch=1, heads=1, head_dim=136, head_dim_v=136)
    given = incoming(case)
    found = rung(case, given)
    wide = [x.astype(np.float64) for x in (case.q, case.k, case.v, given[0], given[1])]
    q, k, v, do, o = (x[0, 0] for x in wide)
    lse, dlse = (given[i][0, 0].astype(np.float64)[:, None] for i in (2, 3))
    scale = q.shape[1] ** -0.5
    p = np.exp(scale * q @ k.T - lse)
    ds = p * (do @ v.T - ((do * o).sum(1, keepdims=True) - dlse))
    for made, right in zip(found[:3], (scale * ds @ k, scale * ds.T @ q, p.T @ do), strict=True):
        assert np.linalg.norm(made[0, 0] - right) < 8 * testing.EPS["float32"] * np.linalg.norm(right)
