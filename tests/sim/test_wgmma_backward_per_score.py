"""What decides about each score or weight on its own in wgmma's backward: functions, bias, mask, dropout. Every
position, every mask, and both kernels in tiles of 32 and 64. Which tiles a mask_mod leaves is in test_block_mask."""

import math

import numpy as np
import pytest
from contracts.backward import Rung, incoming
from contracts.functions import BY_PLACE
from contracts.metamorphic import both_close

from numba_flash import mods, testing
from numba_flash.kernels.recompute import keys as recompute_keys, queries as recompute_queries


@pytest.fixture(scope="module")
def rung():
    return Rung("wgmma", testing.rows_padded, tensor=True, tile=32, slow=True)


SHOWN = np.random.default_rng(7).random((2, 1, 40, 70)) < 0.8
SHOWN[:, :, :33, :33] = False  # so that walks begin behind the first tile, and end before the last
SHOWN[:, :, 33:, 64:] = False
# What goes with functions: all that says which keys, all that changes a score behind them, and heads that share keys.
BESIDE = {
    "lengths": dict(seqlens_k=np.array([70, 23], np.int32), q_offset=np.array([20, -3], np.int32), window=(25, 4)),
    "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4),
    "bias and mask": dict(bias=np.random.default_rng(6).standard_normal((2, 40, 70), dtype=np.float32), mask=SHOWN),
    "dropout": dict(dropout_p=0.3, seed=5, causal=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("beside", BESIDE)
def test_functions_with_all_else(rung, beside):
    batch = 2 if beside == "lengths" else 1
    options = {name: x[:batch] if name == "mask" else x for name, x in BESIDE[beside].items()}
    rows = 40 if beside == "bias and mask" else 18
    case = rung.problem(rows, 70, batch=batch, heads=2, heads_kv=1, head_dim=8, dtype="bfloat16")
    rung.check(case, **BY_PLACE, **options)


ALONE = {
    "mask": dict(mask=SHOWN[:1]),
    "a row that sees nothing": dict(mask=np.arange(40)[None, None, :, None] != 7),
    "nothing at all": dict(mask=np.zeros((1, 1, 1, 70), bool)),
    "nothing at all, and mask_mod": dict(mask=np.zeros((1, 1, 1, 70), bool), mask_mod=mods.sliding_window(15, 3)),
    "bias": dict(bias=np.random.default_rng(6).standard_normal((1, 1, 70), dtype=np.float32), softcap=1.5),
    "dropout": dict(dropout_p=0.4, seed=3, window=(30, 10)),
    "score_mod": dict(score_mod=lambda s, b, h, i, j: s + 0.1 * (j - i)),
    "mask_mod": dict(mask_mod=mods.sliding_window(15, 3), causal=True),
}


@pytest.mark.parametrize("option", ALONE)
def test_each_alone(rung, option):
    case = rung.problem(40, 70, batch=1, heads=2, heads_kv=1, head_dim=8)
    rung.check(case, **ALONE[option])


# Several consumers, tiles that are no power of two, dK and dV apart: (tile_m, tile_n, stages_a, stages_b, apart).
ROWS = {
    "two consumers": ((16, 128, 2, 2, False), (128, 16, 2, 2)),
    "no power of two": ((48, 64, 2, 1, False), (64, 48, 2, 1)),
    "apart": ((32, 64, 2, 1, True), (64, 112, 2, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ROWS)
def test_every_kind_of_row(rung, how, rows_for_every_kind):
    rows_for_every_kind(*ROWS[how])
    case = rung.problem(40, 130, batch=1, heads=1, head_dim=69, head_dim_v=40, dtype="bfloat16")
    generator = np.random.default_rng(2)
    mask = generator.random((40, 130)) < 0.7
    bias = generator.standard_normal((40, 130), dtype=np.float32)
    rung.check(case, causal=True, softcap=2.0, bias=bias, mask=mask, dropout_p=0.2, seed=1, **BY_PLACE)


# dK without dV, and dV without dK, for which a score has no derivative.
@pytest.mark.parametrize(("option", "wanted"), [("score_mod", ("dk",)), ("score_mod", ("dv",)), ("mask_mod", ("dv",))])
def test_what_is_not_wanted_changes_nothing(rung, option, wanted):
    case = rung.problem(18, 20, batch=1, heads=1, head_dim=8, aux=BY_PLACE["aux"], **{option: BY_PLACE[option]})
    given = incoming(case)
    every, some = rung.check(case, given), rung(case, given, wanted)
    assert all(np.array_equal(getattr(every, name), getattr(some, name)) for name in wanted)


# The same problem said in another way. Sums are of the same numbers in the same order where nothing else rounds.
SAME = {
    "causal": (dict(mask_mod=mods.causal), dict(causal=True)),
    "alibi": (
        dict(score_mod=lambda s, b, h, i, j, slopes: s - slopes[h] * abs(i - j), aux=(np.float32([0.3, 0.1]),)),
        dict(alibi_slopes=np.float32([0.3, 0.1])),
    ),
    "softcap": (dict(score_mod=lambda s, b, h, i, j: 2.0 * math.tanh(s / 2.0)), dict(softcap=2.0)),
    "bias": (
        dict(score_mod=lambda s, b, h, i, j, bias: s + bias[i, j], aux=(BESIDE["bias and mask"]["bias"][0],)),
        dict(bias=BESIDE["bias and mask"]["bias"][0]),
    ),
    "mask": (dict(mask_mod=lambda b, h, i, j, mask: mask[i, j], aux=(SHOWN[0, 0],)), dict(mask=SHOWN[:1])),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_the_same_said_in_another_way(rung, name):
    case = rung.problem(40, 70, batch=1, heads=2, heads_kv=1, head_dim=8, q_offset=0)
    own, other = (dict(options) for options in SAME[name])
    case.options |= other
    given = incoming(case)
    expected = rung.check(case, given)
    for option in other:
        del case.options[option]
    case.options |= own
    assert both_close(rung(case, given)[:3], expected[:3])


# A function may read past the end of an array at a position that does not count: with bounds that are checked, as the
# simulator's are, a read is an error.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["causal", "window", "mask", "lengths"])
def test_functions_are_not_called_for_masked_positions(rung, how):
    seqlen_q, seqlen_k = 34, 68  # two tiles of queries; two of keys, and of the queries' kernel three
    i, j = np.arange(seqlen_q)[:, None] + 37, np.arange(seqlen_k)
    mask = (i + j) % 3 > 0
    seen, options = {
        "causal": (i >= j, dict(causal=True)),
        "window": ((i - 6 <= j) & (j <= i + 1), dict(window=(6, 1))),
        "mask": (mask, dict(mask=mask[None, None])),
        "lengths": (np.broadcast_to(j < 41, mask.shape), dict(seqlens_k=np.array([41], np.int32), q_offset=37)),
    }[how]
    allowed = np.where(seen, 1, 2).astype(np.int32)

    def score(s, b, h, q_pos, k_pos, allowed, few):
        return s + few[allowed[q_pos - 37, k_pos]]

    def visible(b, h, q_pos, k_pos, allowed, few):
        return few[allowed[q_pos - 37, k_pos]] == 0.5

    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=8, q_offset=37)
    case.options |= options
    given = incoming(case)
    case.options |= dict(score_mod=score, mask_mod=visible, aux=(allowed, np.array([0.0, 0.5], np.float32)))
    rung.check(case, (*given[:2], given[2] + np.float32(0.5), given[3]))


# Of 16 rows of a warp eight exist, in tiles of which every column counts: 40 of 64 queries, and 72 of 128 keys.
@pytest.mark.parametrize("by", ["mask_mod", "score_mod"])
def test_functions_are_not_called_for_rows_past_the_end(rung, by):
    of_queries, of_keys = (np.linspace(0.25, 0.5, n).astype(np.float32) for n in (40, 72))

    def visible(b, h, q_pos, k_pos, of_queries, of_keys):
        return of_queries[q_pos] + of_keys[k_pos] > 0.8

    def score(s, b, h, q_pos, k_pos, of_queries, of_keys):
        return s * of_queries[q_pos] + of_keys[k_pos]

    case = rung.problem(40, 72, batch=1, heads=1, head_dim=8, q_offset=0)
    rung.check(case, aux=(of_queries, of_keys), **{by: visible if by == "mask_mod" else score})


@pytest.mark.parametrize("where", ["k", "v"])
def test_what_mask_mod_hides_never_reaches_a_gradient(rung, where):
    case = rung.problem(8, 20, batch=1, heads=1, head_dim=8)
    case.options |= dict(mask_mod=lambda b, h, i, j: j != 13, score_mod=lambda s, b, h, i, j: s * s * 0.25 + s)
    given = incoming(case)
    clean = rung.check(case, given)
    getattr(case, where)[:, :, 13] = np.nan
    gradients = rung.check(case, given)
    assert not gradients.dk[:, :, 13].any() and not gradients.dv[:, :, 13].any()
    assert all(np.isfinite(x).all() and x.any() for x in (*gradients[:3], *clean[:3]))


def never(*_):
    raise AssertionError("a row was not finite: something that is hidden was multiplied by 0")


# Rows that meet NaN would come out right by being computed again, and slowly.
@pytest.mark.parametrize("how", ["mask", "mask_mod"])
def test_what_lies_in_tiles_that_are_left_out_is_never_read(rung, how, monkeypatch):
    for module in (recompute_queries, recompute_keys):
        monkeypatch.setattr(module, "make", lambda *_: never)
    case = rung.problem(70, 100, batch=1, heads=1, head_dim=24)
    mask = np.ones((70, 100), bool)
    mask[:32] = mask[:, :32] = False
    options = dict(mask=mask) if how == "mask" else dict(mask_mod=lambda b, h, i, j: i >= 62 and j >= 32)
    case.options |= options
    do, o, lse, dlse = incoming(case)
    for x in (case.q, case.k, case.v, do):
        x[:, :, :32] = np.nan
    gradients = rung.check(case, (do, o, lse, dlse))
    assert all(np.isfinite(x).all() and x.any() for x in gradients[:3])


def test_what_a_hidden_value_gives_is_dropped_before_it_is_multiplied(rung, monkeypatch):
    for module in (recompute_queries, recompute_keys):
        monkeypatch.setattr(module, "make", lambda *_: never)
    case = rung.problem(8, 20, batch=1, heads=1, head_dim=24)
    case.options |= dict(mask_mod=lambda b, h, i, j: j != 11)
    given = incoming(case)
    case.v[:, :, 11] = np.nan
    rung.check(case, given)


# What some rows see and others do not: those that are computed again ask the functions, too.
@pytest.mark.slow
@pytest.mark.parametrize("where", ["k", "q", "do"])
def test_nonfinite_rows_are_recomputed(rung, where):
    case = rung.problem(8, 36, batch=1, heads=1, head_dim=8, **BY_PLACE)
    case.options |= dict(causal=True) | (dict(dropout_p=0.2, seed=3) if where == "do" else {})
    do, o, lse, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 34 if where == "k" else 5] = np.nan
    if where != "do":
        _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any((0, 1, 3)) for x in gradients[:3]]
    assert any(rows.any() for rows in nonfinite) and not all(rows.all() for rows in nonfinite)


# -inf by the function is a weight of 0, whatever its derivative is there.
def test_a_score_of_minus_infinity_gives_nothing(rung):
    case, other = (rung.problem(9, 18, batch=1, heads=1, head_dim=8) for _ in range(2))
    case.options["score_mod"] = lambda s, b, h, i, j: s * s if (i + j) % 2 else -math.inf
    other.options["score_mod"] = lambda s, b, h, i, j: s * s if (i + j) % 2 else -math.inf * (1 + s * s)
    given = incoming(case)
    gradients, same = rung.check(case, given), rung(other, given)
    assert all(np.isfinite(x).all() and x.any() for x in gradients[:3])
    assert both_close(same[:3], gradients[:3])
