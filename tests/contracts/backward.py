"""The contract of attention_backward(), line by line, for whatever kernel the fixture `rung` holds.

Each tier has its own `rung`. Gradients are compared with the oracle's from the same o and lse; the other tests state
one promise each, and compare bits wherever the promise is about bits.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, strategies as st

import numba_flash
from contracts import forward
from contracts.forward import same_bits
from numba_flash import testing
from numba_flash.api.backward import AttentionGradients
from numba_flash.problem.options import GRADIENT_OF
from numba_flash.testing import Case, exact as testing_exact

NAMES = tuple(GRADIENT_OF)  # without daux, of which a problem has any number: tests/contracts/functions.py


@dataclass(frozen=True)
class Rung(forward.Rung):
    """A kernel and the arrays it takes, for gradients."""

    REFUSALS: ClassVar = (
        *forward.Rung.REFUSALS, "no gradient of alibi_slopes", "no bias", "no mask", "no score_mod",
    )  # fmt: skip

    @property
    def features(self):
        """What it takes of testing.FEATURES."""
        return tuple(name for name in testing.FEATURES if not self.tensor or name not in ("bias", "mask"))

    def __call__(self, case, given=None, wanted=None, **options):
        """AttentionGradients of a case as NumPy arrays; given: do, o, lse, dlse, else random ones."""
        do, o, lse, dlse = (x if x is None else self.move(x) for x in given or incoming(case))
        with self.skipping_refusals():
            gradients = numba_flash.attention_backward(
                do, **case.arguments(self.move) | options, o=o, lse=lse, dlse=dlse, kernel=self.kernel,
                wanted=wanted or self.gradients_of(case),
            )  # fmt: skip
        own, daux = gradients[:-1], gradients.daux
        daux = None if daux is None else tuple(x if x is None else self.back(x) for x in daux)
        return AttentionGradients(*(x if x is None else self.back(x) for x in own), daux)

    def gradients_of(self, case):
        """Every gradient that the case has and the kernel makes."""
        every = testing.gradients_of(case)
        return tuple(name for name in every if not self.tensor or name != "dalibi_slopes")

    def check(self, case, given=None, wanted=None, **options):
        case.options |= options
        given = given or incoming(case)
        gradients = self(case, given, wanted)
        testing.check_gradients(case, gradients, *given, self.kernel)
        return gradients


def incoming(case, seed=0, strange_strides=False):
    """do, o, lse and dlse: o and lse are the oracle's, rounded as a forward would."""
    do, dlse = testing.outer_gradients(case, seed, strange_strides)
    o, lse = testing.oracle(case)
    o = o if case.options.get("layout", "bhsd") == "bhsd" else np.ascontiguousarray(o.swapaxes(1, 2))
    with np.errstate(over="ignore"):
        return do, o.astype(do.dtype), lse.astype(dlse.dtype), dlse


def same(one, other):
    return all((x is None and y is None) or same_bits(x, y) for x, y in zip(one, other, strict=True))


@given(st.data())
def test_random_problems_agree_with_the_oracle(rung, data):
    case = data.draw(testing.cases(**rung.limits))
    given = incoming(case, data.draw(st.integers(0, 100)), rung.limits.get("strange_strides", True))
    given = given if data.draw(st.booleans()) else (*given[:3], None)
    rung.check(case, given)


# Every dtype that is taken, each with all that changes a score.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_all_options_at_once(rung, dtype):
    generator = np.random.default_rng(1)
    added = dict(
        bias=generator.standard_normal((2, 1, 17, 33)).astype(dtype), mask=generator.random((1, 2, 17, 33)) < 0.7
    )
    rung.check(
        rung.problem(17, 33, dtype=dtype, head_dim_v=5),
        **{name: added[name] for name in rung.features if name in added},
        causal=True,
        window=(20, 3),
        seqlens_k=np.array([33, 12], np.int32),
        q_offset=np.array([16, -2], np.int32),
        softcap=3.0,
        scale=0.7,
        alibi_slopes=np.array([0.5, 0.125], np.float32),
        sinks=np.array([0.3, -1.5], dtype),
    )


# None, one that turns the order around, and one by which a single key takes all.
@pytest.mark.parametrize("scale", [0, -0.5, 1e4])
def test_scale(rung, scale):
    gradients = rung.check(rung.problem(batch=rung.batch, scale=scale))
    assert scale or not (gradients.dq.any() or gradients.dk.any())


# One element; odd and prime, which no vector or tile divides; past 256, the limit of most kernels; DeepSeek's 576.
@pytest.mark.parametrize("head_dim", [1, 7, 59, 257, 576])
def test_any_head_dim(rung, head_dim):
    rung.check(rung.problem(5, 9, batch=1, heads=2, heads_kv=1, head_dim=head_dim))


# Either may be the larger one, by less and by more than a tile.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 9), (33, 1), (3, 70)])
def test_head_dim_v_may_differ(rung, head_dim, head_dim_v):
    rung.check(rung.problem(6, 11, batch=1, head_dim=head_dim, head_dim_v=head_dim_v))


# One query head a KV head, a group that is no power of two, and multi-query attention.
@pytest.mark.parametrize(("heads", "heads_kv"), [(3, 3), (6, 2), (8, 1)])
def test_a_kv_head_gets_the_sum_of_its_group(rung, heads, heads_kv):
    rung.check(rung.problem(4, 10, batch=1, heads=heads, heads_kv=heads_kv))


# Below, at and above the tile sizes of all kernels, and lengths of one.
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 40), (40, 1), (15, 17), (16, 16), (17, 15), (33, 47), (3, 64)]
)
def test_lengths_need_be_no_multiple(rung, seqlen_q, seqlen_k):
    rung.check(rung.problem(seqlen_q, seqlen_k, batch=1), causal=True)


# In tiles of keys, as in the forward's contract: tiles that are free, cut by either edge, seen by no row.
@pytest.mark.parametrize("how", forward.TILES)
def test_many_tiles(rung, how):
    def in_keys(x):
        return x if x is None or isinstance(x, bool) else int(x * rung.tile)

    options = dict(forward.TILES[how])
    for name in ("window", "seqlens_k"):
        if name in options:
            options[name] = tuple(map(in_keys, options[name]))
    if "q_offset" in options:
        options["q_offset"] = in_keys(options["q_offset"])
    if "seqlens_k" in options:
        options["seqlens_k"] = np.array(options["seqlens_k"], np.int32)
    batch = 2 if "seqlens_k" in options else 1
    rung.check(rung.problem(int(2.6 * rung.tile), int(4.3 * rung.tile), heads=1, head_dim=8, batch=batch, **options))


# Each extent that may be 0, alone. Without queries the keys' gradients are there, and zero; and the other way around.
@pytest.mark.parametrize("nothing", ["batch", "seqlen_q", "seqlen_k", "heads"])
def test_nothing_is_defined(rung, nothing):
    extents = dict(batch=2, seqlen_q=5, seqlen_k=6) | {nothing: 0}
    if nothing == "heads":
        extents["heads_kv"] = 0
    case = rung.problem(**extents)
    if "bias" in rung.features:
        case.options["bias"] = np.ones((1, 1, 1, extents["seqlen_k"]), np.float32)
    gradients = rung.check(case)
    assert all(not x.any() for x in gradients if x is not None)


# Products of whole numbers, which nothing rounds: a single one that is wrong changes a bit. Tiles that are walked whole
# and in part, of one head and of a group.
@pytest.mark.parametrize("causal", [False, True])
def test_whole_numbers_come_out_exactly(rung, causal):
    case, (do, o, lse), right = testing_exact.whole_problem(
        0, rung.dtype, int(1.3 * rung.tile), int(2.2 * rung.tile), head_dim=24, head_dim_v=40, causal=causal
    )
    found = rung(case, (do, o, lse, None), wanted=("dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        assert same_bits(getattr(found, name), getattr(right, name)), name


def with_scores_around(rung, level):
    """A case whose scores and lse are about `level`: one element of each row makes it."""
    case = rung.problem(20, 30, batch=rung.batch, heads=1, head_dim=8, scale=1.0)
    case.q[..., 0], case.k[..., 0] = 16, level / 16
    return case


# Where exp overflows, and where it is zero: float32's ends, and both far beyond.
@pytest.mark.parametrize("level", [-89, 89, -3000, 3000])
@pytest.mark.parametrize("options", [{}, dict(causal=True, q_offset=-3)], ids=["all", "empty rows"])
def test_lse_beyond_the_range_of_exp(rung, level, options):
    case = with_scores_around(rung, level)
    _, _, lse, _ = incoming(case)
    assert np.sign(lse[0, 0, -1]) == np.sign(level) and abs(lse[0, 0, -1]) > 80
    gradients = rung.check(case, **options)
    assert all(np.isfinite(x.astype(np.float64)).all() for x in gradients if x is not None)
    assert gradients.dv.any() and gradients.dq.any()


# Every way in which a row can come to see no key, with all that such a row must not be moved by.
@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
@pytest.mark.parametrize("how", forward.HIDING)
def test_a_row_that_sees_no_key_gives_and_gets_zero(rung, how, value):
    if how not in ("causal", "window", "seqlens_k", *rung.features):
        pytest.skip(f"it takes no {how}")
    hiding = forward.HIDING[how]
    case = rung.problem(6, 7, **hiding)
    if how == "bias":
        visible = np.broadcast_to(np.arange(6) % 3 != 0, (2, 2, 6))
    else:
        visible = np.broadcast_to(testing.formula.visible_keys(case), (2, 2, 6, 7)).any(-1)
    assert visible.any() and not visible.all()
    do, o, lse, dlse = incoming(case)
    clean = rung(case, (do, o, lse, dlse))
    struck_do, struck_dlse = do.copy(), dlse.copy()
    struck_do[~visible], struck_dlse[~visible] = value, value
    unstruck = Case(case.q.copy(), case.k, case.v, case.options)
    case.q[~visible] = value
    gradients = rung(case, (struck_do, o, lse, struck_dlse))
    assert not gradients.dq[~visible].any()
    if rung.tensor:  # rows that met what is strange are computed again, in another order
        testing.check_gradients(unstruck, gradients, do, o, lse, dlse, rung.kernel)
    else:
        assert same(gradients, clean)
    assert all(np.isfinite(x).all() for x in clean if x is not None)


# It gives to its sink what came for lse, which is the sink, and of do nothing, even NaN: its o is 0 and stays 0.
@pytest.mark.parametrize("value", [1.0, np.nan])
@pytest.mark.parametrize("how", forward.HIDING)
def test_a_row_that_sees_no_key_gives_its_sink_dlse_alone(rung, how, value):
    if how not in ("causal", "window", "seqlens_k", *rung.features):
        pytest.skip(f"it takes no {how}")
    case = rung.problem(6, 7, **forward.HIDING[how])
    empty = testing.oracle(case)[1] == -np.inf
    case.options["sinks"] = np.array([[1.25, -0.5], [-2.5, -np.inf]], np.float32)
    do, o, lse, dlse = incoming(case)
    assert empty.any() and (o[empty] == 0).all()
    do[empty] = value
    given = (do, o, lse, dlse)
    gradients = rung(case, given)
    clean = np.where(empty[..., None], 0, do).astype(do.dtype)
    testing.check_gradients(case, gradients, clean, o, lse, dlse, rung.kernel)
    assert not gradients.dq[empty].any() and gradients.dsinks[1, 1] == 0


# Ways to hide key 13 from every query.
UNSEEN = {
    "causal": dict(causal=True, q_offset=-8),
    "window": dict(window=(5, 2), q_offset=20),
    "seqlens_k": dict(seqlens_k=np.array([13, 9], np.int32)),
    "mask": dict(mask=(np.arange(30) != 13)[None, None, None]),
    "mask and softcap": dict(mask=(np.arange(30) != 13)[None, None, None], softcap=2.0),
}


# NaN, both infinities, and a number whose product overflows, in everything that belongs to the key at once.
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 6e4])
@pytest.mark.parametrize("how", UNSEEN)
def test_what_no_query_sees_never_reaches_a_gradient(rung, how, value):
    if "mask" in how and "mask" not in rung.features:
        pytest.skip("it takes no mask")
    batch = 2 if how == "seqlens_k" else rung.batch
    case = rung.problem(batch=batch, dtype="float16" if value == 6e4 else rung.dtype, **UNSEEN[how])
    if "bias" in rung.features:
        case.options["bias"] = np.zeros((batch, 2, 20, 30), np.float32)
    given = incoming(case)
    clean = rung(case, given)
    case.k[:, :, 13:14], case.v[:, :, 13:14] = value, value
    if "bias" in case.options:
        case.options["bias"][..., 13] = value
    gradients = rung(case, given)
    assert not gradients.dk[:, :, 13].any() and not gradients.dv[:, :, 13].any()
    if rung.tensor:  # rows that met what is strange are computed again, in another order
        testing.check_gradients(case, gradients, *given, rung.kernel)
    else:
        assert same(gradients, clean)
    assert clean.dq.any() and clean.dk.any() and clean.dv.any()


# What some queries see and others do not: the oracle says which gradients are nonfinite, and each place alone shows.
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("how", ["causal", "left", "seqlens_k"])
def test_what_is_seen_strikes_what_depends_on_it(rung, how, where):
    case = rung.problem(**forward.BLINDS[how])
    do, o, lse, dlse = incoming(case)
    array = do if where == "do" else getattr(case, where)
    array[:, :, 13] = np.nan
    if where != "do":
        _, o, lse, _ = incoming(case)
    gradients = rung.check(case, (do, o, lse, dlse))
    nonfinite = [np.isnan(x).any() for x in gradients if x is not None]
    assert any(nonfinite) and not np.isnan(gradients.dq).all()


def test_a_key_of_weight_0_gets_no_gradient_from_a_nonfinite_row(rung):
    """Its score of -inf says that its weight is 0, whatever else the row sees and its lse has become."""
    case = rung.problem(5, 9, batch=1, heads=1, head_dim=7, causal=True)
    last = case.k.shape[2] - 1
    case.q[:, :, -2:, 0] = 1
    case.k[:, :, last - 1, 0], case.k[:, :, last] = -np.inf, np.nan
    gradients = rung.check(case, incoming(case))
    assert not gradients.dk[:, :, last - 1].any() and not gradients.dv[:, :, last - 1].any()
    assert np.isnan(gradients.dk[:, :, 0]).any() and np.isnan(gradients.dv[:, :, last]).any()


# The bound of check_gradients is in units of the largest lse, and would let everything pass. But for the rounding of
# lse itself nothing is lost: P = e^(S - lse) of the lse that is given, at most 1. All scores are the bias.
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("level", forward.LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("how", [dict(scale=0.0), dict(softcap=1.0, scale=0.0)], ids=str)
def test_scores_of_any_size(rung, dtype, level, sign, how):
    if "bias" not in rung.features:
        pytest.skip("it takes no bias")
    case = forward.at_a_level(rung, dtype, level, sign, **how)
    given = incoming(case)
    do, o, lse, dlse = (x.astype(np.float64) for x in given)
    s = case.options["bias"].astype(np.float64)
    p = np.exp(np.minimum(s - lse[..., None], 0))
    if rung.kernel == "reference":  # which does without that rounding
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
    delta = (do * o).sum(-1, keepdims=True) - dlse[..., None]
    expected = dict(dv=p.swapaxes(2, 3) @ do, dbias=p * (do @ case.v.astype(np.float64).swapaxes(2, 3) - delta))
    found, eps = rung(case, given), 2.0**-7 if dtype == "bfloat16" else 1e-4
    for name, right in expected.items():
        got = getattr(found, name).astype(np.float64)
        assert np.abs(got - right).max() <= eps * np.abs(right).max() and right.any(), name


_together: dict = {}  # all gradients of the problem below, by kernel, dtype and arrays


# Each alone, pairs as an optimiser with frozen layers asks for, and in another order.
@pytest.mark.parametrize(
    "wanted",
    [("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dv", "dq"), ("dbias",), ("dalibi_slopes",), ("dalibi_slopes", "dk"),
     ("dsinks",), ("dk", "dsinks")],
    ids="-".join,
)  # fmt: skip
def test_what_is_not_wanted_changes_nothing(rung, wanted):
    slopes, sinks = np.array([0.5, 0.125], np.float32), np.array([1.5, -0.5], np.float32)
    case = rung.problem(batch=rung.batch, softcap=4.0, alibi_slopes=slopes, sinks=sinks)
    if "bias" in rung.features:
        case.options["bias"] = np.random.default_rng(2).standard_normal((2, 20, 1)).astype(np.float32)
    if not set(wanted) <= set(rung.gradients_of(case)):
        pytest.skip(f"it has no gradient for some of {wanted}")
    key = rung.kernel, rung.dtype, rung.move
    if key not in _together:
        _together[key] = rung(case)
    every, some = _together[key], rung(case, wanted=wanted)
    for name in NAMES:
        one, other = getattr(some, name), getattr(every, name)
        assert one is None if name not in wanted else same_bits(one, other)


# All that broadcasting allows: a number, missing axes, each axis of one element; and one that only looks whole.
@pytest.mark.parametrize(
    "shape", [(), (14,), (9, 14), (2, 1, 14), (1, 2, 9, 1), (2, 1, 1, 14), (2, 1, 9, 14), (2, 2, 9, 14)]
)
def test_dbias_has_the_shape_of_bias(rung, shape):
    generator = np.random.default_rng(3)
    bias = np.asarray(generator.standard_normal(shape).astype(np.float32))
    gradients = rung.check(rung.problem(9, 14, bias=bias))
    assert gradients.dbias.shape == shape
    repeated = np.broadcast_to(bias, (2, 2, 9, 14))
    assert rung.check(rung.problem(9, 14, bias=repeated)).dbias.shape == (2, 2, 9, 14)


# What is added to every score of a row changes no weight, so that only lse can feel it.
def test_a_bias_that_is_the_same_for_all_keys_is_felt_by_lse_alone(rung):
    case = rung.problem(9, 14, dtype="float64", bias=np.zeros((2, 2, 9, 1)))
    do, o, lse, dlse = incoming(case)
    dbias = rung(case, (do, o, lse, dlse), wanted=("dbias",)).dbias
    assert np.allclose(dbias[..., 0], dlse, rtol=0, atol=1e-13)


# Slopes of all entries and of each, for the same scores.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_slopes_of_each_batch_entry_or_of_all(rung, dtype):
    slopes = np.array([0.5, 0.125], np.float32)
    case = rung.problem(9, 14, dtype=dtype, alibi_slopes=slopes, causal=True, q_offset=3)
    of_all = rung.check(case).dalibi_slopes
    case.options["alibi_slopes"] = np.stack([slopes, slopes])
    of_each = rung.check(case).dalibi_slopes
    if of_all is not None:
        assert of_all.shape == (2,) and of_each.shape == (2, 2)
        assert np.allclose(of_each.sum(0), of_all, rtol=1e-5, atol=1e-5)


# Sinks of all entries and of each, in both dtypes; several heads share a KV head.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_sinks_of_each_batch_entry_or_of_all(rung, dtype):
    sinks = np.array([0.5, 2.0, -1.0, 0.0], np.float32)
    case = rung.problem(9, 14, heads=4, dtype=dtype, sinks=sinks, causal=True, q_offset=3)
    of_all = rung.check(case).dsinks
    case.options["sinks"] = np.stack([sinks, sinks])
    of_each = rung.check(case).dsinks
    assert of_all.shape == (4,) and of_each.shape == (2, 4) and of_all.all()
    assert np.allclose(of_each.sum(0), of_all, rtol=1e-5, atol=1e-5)
    case.options["sinks"] = np.stack([sinks, sinks], 1).astype(dtype)[:, 0]
    assert rung.check(case).dsinks.dtype == dtype


# A number added to a sink and to all scores is added to lse, and moves nothing else. Many rows; some see no key.
def test_dsinks_and_dbias_together_are_dlse(rung):
    if "bias" not in rung.features:
        pytest.skip("it takes no bias")
    case = rung.problem(150, 30, causal=True, bias=np.zeros((1, 2, 1, 1), np.float32), sinks=np.ones(2, np.float32))
    do, o, lse, dlse = incoming(case)
    gradients = rung(case, (do, o, lse, dlse))
    both, expected = gradients.dbias[0, :, 0, 0] + gradients.dsinks, dlse.sum((0, 2))
    # o and do are in the rung's dtype: delta is off by its rounding in each row
    eps = testing.EPS[case.dtype] * np.abs(do.astype(np.float64) * o).sum((0, 2, 3)) + 1e-4
    assert (np.abs(both - expected) <= eps).all() and np.abs(gradients.dsinks).min() > 1e-2


def test_no_dlse_is_a_dlse_of_zeros(rung):
    case = rung.problem()
    do, o, lse, dlse = incoming(case)
    assert same(rung(case, (do, o, lse, None)), rung(case, (do, o, lse, np.zeros_like(dlse))))
    assert not same(rung(case, (do, o, lse, None)), rung(case, (do, o, lse, dlse)))


# docs/numerics.md: P is off by a factor of e^(eps * (1 + |lse| + |s|)) at most, and is at most 1.
@pytest.mark.parametrize("size", [1e5, 1e7, 1e10])
@pytest.mark.parametrize("sinks", [False, True])
def test_large_scores(rung, size, sinks):
    if rung.tensor and rung.dtype in ("float16", "bfloat16"):
        pytest.skip("tensor cores do not bound P in 16 bits (docs/numerics.md)")
    if rung.tensor and rung.slow and size < 1e10:
        pytest.skip("the largest size in the simulator: only that makes a weight above 1 where it is not bounded")
    case = rung.problem(16, 16, heads=1, head_dim=8, batch=4, scale=size / 10)  # q . k is up to 10
    if sinks:
        case.options["sinks"] = np.array([size / 20], np.float32 if rung.tensor else rung.dtype)
    gradients = rung.check(case)
    do = incoming(case)[0].astype(np.float64)
    assert np.abs(gradients.dv.astype(np.float64)).max() <= np.abs(do).sum(2).max()  # as every weight is at most 1


# As each of several machines has a part of the keys: its gradients follow from the o and lse of all.
def test_parts_of_the_keys(rung):
    whole = rung.problem(9, 30, q_offset=21, causal=True)
    do, o, lse, dlse = given = incoming(whole)
    exact = do, o, testing.oracle(whole)[1], dlse  # lse, which says what share of each row a part has, is not rounded
    expected = testing.oracle_gradients(whole, *exact)
    parts = []
    for start, end in ((0, 13), (13, 30)):
        k, v = (np.ascontiguousarray(x[:, :, start:end]) for x in (whole.k, whole.v))
        case = Case(whole.q, k, v, dict(causal=True, q_offset=21 - start))
        rung.check(case, given)
        parts.append(testing.oracle_gradients(case, *exact))
    assert np.allclose(sum(part.dq for part in parts), expected.dq, rtol=0, atol=1e-12)
    for name in ("dk", "dv"):
        together = np.concatenate([getattr(part, name) for part in parts], 2)
        assert np.allclose(together, getattr(expected, name), rtol=0, atol=1e-12)


# Every dtype: its own conversions, accumulators and tiles.
@pytest.mark.parametrize("dtype", testing.DTYPES)
def test_equal_calls_give_equal_bits(rung, dtype):
    case = rung.problem(dtype=dtype, causal=True, batch=rung.batch)
    given = incoming(case)
    first = rung(case, given)
    assert all(same(rung(case, given), first) for _ in range(1 if rung.slow else 2))


def test_bits_do_not_depend_on_batch_neighbours(rung):
    case = rung.problem(9, 45, batch=3, causal=True)
    given = incoming(case)
    every = rung(case, given)
    for b in range(3):
        alone = Case(case.q[b : b + 1], case.k[b : b + 1], case.v[b : b + 1], case.options)
        gradients = rung(alone, tuple(x[b : b + 1] for x in given))
        assert same(gradients[:3], [x[b : b + 1] for x in every[:3]])


def test_layouts_are_the_same_function(rung):
    case = rung.problem(causal=True)
    do, o, lse, dlse = incoming(case)
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (case.q, case.k, case.v, do, o)]
    other = Case(*turned[:3], dict(causal=True, layout="bshd"))
    gradients, expected = rung(other, (turned[3], turned[4], lse, dlse)), rung(case, (do, o, lse, dlse))
    for name in ("dq", "dk", "dv"):
        assert same_bits(getattr(gradients, name).transpose(0, 2, 1, 3), getattr(expected, name))


# Both layouts; each dtype that lse is computed in.
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_what_is_returned(rung, layout, dtype):
    case = rung.problem(5, 6, heads=4, head_dim_v=3, dtype=dtype)
    if layout == "bshd":
        case = Case(*(x.transpose(0, 2, 1, 3) for x in (case.q, case.k, case.v)), dict(layout=layout))
    gradients = rung(case, wanted=("dq", "dk", "dv"))
    assert isinstance(gradients, numba_flash.AttentionGradients)
    for name in ("q", "k", "v"):
        array, gradient = getattr(case, name), getattr(gradients, f"d{name}")
        assert gradient.shape == array.shape and gradient.dtype == array.dtype and gradient.flags.c_contiguous
    assert gradients.dbias is None and gradients.dalibi_slopes is None


def test_no_input_is_changed_and_any_may_be_read_only(rung):
    case = rung.problem(causal=True)
    given = incoming(case)
    arrays = (case.q, case.k, case.v, *given)
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    rung(case, given)
    assert same(arrays, before)


# Every unusual stride that the testing kit knows, for all arrays at once; lse alone must be contiguous.
@pytest.mark.parametrize("how", testing.STRIDES)
def test_any_strides(rung, how):
    case = rung.problem(9, 14, head_dim=8)
    do, o, lse, dlse = incoming(case)
    strange = Case(*(testing.strided(x, rung.dtype, how) for x in (case.q, case.k, case.v)))
    given = incoming(strange)
    given = (*(testing.strided(x, rung.dtype, how) for x in given[:2]), lse if how != "broadcast" else given[2])
    if how in forward.NOT_FETCHED.get(rung.kernel, ()):
        with pytest.raises(NotImplementedError, match="not contiguous along dim|begins at an address|fetched by TMA"):
            rung(strange, (*given, dlse))
        return
    rung.check(strange, (*given, np.broadcast_to(dlse[:, :, :1], dlse.shape)))
