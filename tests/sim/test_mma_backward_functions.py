"""score_mod and mask_mod in mma's backward: every position, every mask; every kind of row is in
test_mma_backward."""

import math

import numpy as np
import pytest
from contracts.backward import Rung, incoming
from contracts.functions import BY_PLACE
from contracts.metamorphic import both_close

from numba_flash import testing


@pytest.fixture(scope="module")
def rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)


# What goes with them: all that says which keys, all that changes a score behind them, and heads that share keys.
BESIDE = {
    "lengths": dict(seqlens_k=np.array([41, 23], np.int32), q_offset=np.array([20, -3], np.int32), window=(25, 4)),
    "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4),
    "bias and mask": dict(
        bias=np.random.default_rng(6).standard_normal((2, 18, 41), dtype=np.float32),
        mask=np.random.default_rng(7).random((2, 1, 18, 41)) < 0.8,
    ),
    "dropout": dict(dropout_p=0.3, seed=5, causal=True),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_functions_with_all_else(rung, beside):
    batch = 2 if beside == "lengths" else 1
    options = {name: x[:batch] if name == "mask" else x for name, x in BESIDE[beside].items()}
    case = rung.problem(18, 41, batch=batch, heads=2, heads_kv=1, head_dim=8, dtype="bfloat16")
    rung.check(case, **BY_PLACE, **options)


# dK without dV, and dV without dK, for which a score has no derivative.
@pytest.mark.parametrize(("option", "wanted"), [("score_mod", ("dk",)), ("score_mod", ("dv",)), ("mask_mod", ("dv",))])
def test_what_is_not_wanted_changes_nothing(rung, option, wanted):
    case = rung.problem(18, 20, batch=1, aux=BY_PLACE["aux"], **{option: BY_PLACE[option]})
    given = incoming(case)
    every, some = rung.check(case, given), rung(case, given, wanted)
    assert all(np.array_equal(getattr(every, name), getattr(some, name)) for name in wanted)


# A function may read past the end of an array at a position that does not count: with bounds that are checked, as the
# simulator's are, a read is an error.
@pytest.mark.parametrize("how", ["causal", "window", "mask", "lengths"])
def test_functions_are_not_called_for_masked_positions(rung, how):
    seqlen_q, seqlen_k = 34, 35  # two tiles of queries, and three of keys
    i, j = np.arange(seqlen_q)[:, None] + 17, np.arange(seqlen_k)
    mask = (i + j) % 3 > 0
    seen, options = {
        "causal": (i >= j, dict(causal=True)),
        "window": ((i - 6 <= j) & (j <= i + 1), dict(window=(6, 1))),
        "mask": (mask, dict(mask=mask[None, None])),
        "lengths": (np.broadcast_to(j < 21, mask.shape), dict(seqlens_k=np.array([21], np.int32), q_offset=17)),
    }[how]
    allowed = np.where(seen, 1, 2).astype(np.int32)

    def score(s, b, h, q_pos, k_pos, allowed, few):
        return s + few[allowed[q_pos - 17, k_pos]]

    def visible(b, h, q_pos, k_pos, allowed, few):
        return few[allowed[q_pos - 17, k_pos]] == 0.5

    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=8, q_offset=17)
    case.options |= options
    given = incoming(case)
    case.options |= dict(score_mod=score, mask_mod=visible, aux=(allowed, np.array([0.0, 0.5], np.float32)))
    rung.check(case, (*given[:2], given[2] + np.float32(0.5), given[3]))


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


# What some rows see and others do not: those that are computed again ask the functions, too.
@pytest.mark.parametrize("where", ["k", "q", "do"])
def test_nonfinite_rows_are_recomputed(rung, where):
    case = rung.problem(8, 36, batch=1, heads=2, heads_kv=1, head_dim=8, **BY_PLACE)
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
