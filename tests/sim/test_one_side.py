"""ALiBi in tiles on one side of the queries (numba_flash/kernels/wgmma/one_side.py)."""

import numpy as np
import pytest
from contracts import forward

from numba_flash import testing
from numba_flash.api import forward as api
from numba_flash.dispatch import forward as dispatch
from numba_flash.kernels.wgmma import one_side
from numba_flash.select import forward_kernels as select, tiles

SLOPES = np.array([0.5, 0.03], np.float32)


def config_of(case, **options):
    return api.prepare_call(case.q, case.k, case.v, dict(options, kernel="wgmma"))[1].choice.config


@pytest.fixture(scope="session")
def rung():
    return forward.Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


# 64 queries and 32 keys to a tile: tiles on either side, and between them some on both. The last rows have the largest
# scores in their first tile, so their maxima do not move; those of the first rows do, in lanes with different shifts.
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (dict(seqlen_q=70, seqlen_k=300), dict(q_offset=100)),
        (dict(seqlen_q=70, seqlen_k=200), dict(causal=True)),
        (dict(seqlen_q=70, seqlen_k=200), dict(window=(70, 40))),
        (dict(seqlen_q=20, seqlen_k=100), dict(q_offset=4000)),  # all keys before
        (dict(seqlen_q=20, seqlen_k=100), dict(q_offset=-4000)),  # all behind
        (dict(seqlen_q=70, seqlen_k=200), dict(q_offset=60, seqlens_k=np.array([130], np.int32))),
        (dict(seqlen_q=70, seqlen_k=200), dict(q_offset=60, sinks=np.array([1.0, -2.0], np.float32))),
        (dict(seqlen_q=70, seqlen_k=200), dict(q_offset=60, dropout_p=0.3, seed=5)),
    ],
    ids=["both sides", "causal", "window", "far before", "far behind", "lengths", "sinks", "dropout"],
)
def test_against_the_oracle(rung, shape, options):
    case = rung.problem(**shape, batch=1, heads=2, heads_kv=1, head_dim=16)
    rung.check(case, alibi_slopes=SLOPES, **options)


def test_heads_that_share_a_tile_have_slopes_of_their_own(rung):
    case = rung.problem(10, 200, batch=2, heads=4, heads_kv=1, head_dim=16)
    slopes = np.array([0.5, 0, 0.03, 0.2], np.float32)
    assert config_of(case, alibi_slopes=slopes).group_size == 4
    rung.check(case, alibi_slopes=slopes, q_offset=90)


# A scale that cannot wait, or a slope by which something would overflow: then all tiles are computed alike.
@pytest.mark.parametrize("options", [dict(scale=0.0), dict(scale=-0.3), dict(scale=1e-31), dict(scale=1e-20)], ids=str)
def test_a_scale_that_cannot_wait(rung, options):
    case = rung.problem(40, 200, batch=1, heads=2, heads_kv=1, head_dim=16, q_offset=90)
    rung.check(case, alibi_slopes=SLOPES, **options)


@pytest.mark.parametrize("slope", [3e37, np.inf, np.nan])
def test_a_slope_that_is_too_steep(rung, slope):
    """Of one head; the other's rows keep their bits."""
    case = rung.problem(40, 140, batch=1, heads=2, heads_kv=2, head_dim=16, q_offset=90)
    right, lse = rung(case, alibi_slopes=SLOPES)
    case.options["alibi_slopes"] = np.array([slope, SLOPES[1]], np.float32)
    o, other_lse = rung(case)
    assert (o[:, 1] == right[:, 1]).all() and (lse[:, 1] == other_lse[:, 1]).all()
    if slope < np.inf:
        testing.check(case, o, other_lse, "wgmma")


def test_bits_do_not_depend_on_the_rows_of_a_block(rung, monkeypatch, nothing_remembered):
    case, found = rung.problem(130, 300, batch=1, heads=1, heads_kv=1, head_dim=16, q_offset=100), []
    rows = tuple(row.changed(tile_m=128) for row in tiles.TABLES["wgmma"])
    monkeypatch.setitem(tiles.TABLES, "wgmma", rows)
    for tile_m in (64, 128):
        monkeypatch.setattr(select, "TILE_COST", {tile_m: 1.0})
        dispatch._plans.clear()
        assert config_of(case, alibi_slopes=SLOPES[:1]).tile_m == tile_m
        found.append(rung(case, alibi_slopes=SLOPES[:1]))
    assert all((x == y).all() for x, y in zip(*found, strict=True))


def test_an_infinite_slope_leaves_no_weight(rung):
    """All scores are -inf."""
    case = rung.problem(20, 100, batch=1, heads=2, heads_kv=2, head_dim=16, q_offset=500)
    rung.check(case, alibi_slopes=np.array([np.inf, 0.03], np.float32))
    o, lse = rung(case)
    assert not o[:, 0].any() and (lse[:, 0] == -np.inf).all() and np.isfinite(lse[:, 1]).all()


@pytest.mark.parametrize("position", [0, 16, 17, 30, 31, 32, 62, 100, -1, -15, -16, -(2**40), 2**31, 2**62])
def test_which_tiles_lie_on_one_side_of_the_queries(rung, position):
    case = rung.problem(64, 64, batch=1, heads=2, heads_kv=2, head_dim=16)
    config = config_of(case, alibi_slopes=SLOPES)
    made = one_side.make(config)
    assert made.present and (config.group_size, config.tile_n) == (1, 32)
    before, behind, _ = made.ends(np.int64(position - 48), np.int32(48), np.float32(4))
    for j in range(8):
        keys = np.arange(32 * j, 32 * j + 32)
        assert (j < before) == (keys.max() <= position)
        assert (j >= behind) == (keys.min() >= position + 15)
    assert made.ends(np.int64(position), np.int32(0), np.float32(0)) == (0, one_side.FAR, 0), "none are linear"


def test_only_where_nothing_else_changes_scores(rung):
    case = rung.problem(64, 64, batch=1, heads=2, heads_kv=1, head_dim=16)
    for options, present in (
        (dict(causal=True, sinks=SLOPES, mask=np.ones((64, 64), bool)), True),
        (dict(softcap=5.0), False),
        (dict(bias=np.zeros((64, 64), np.float32)), False),
        (dict(score_mod=lambda score, b, h, q_pos, k_pos: score + 1), False),
    ):
        assert one_side.make(config_of(case, alibi_slopes=SLOPES, **options)).present == present
