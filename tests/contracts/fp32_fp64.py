"""What holds of float32 and float64 on tensor cores beside the contract, for the kernel of the fixture `rung`."""

import numpy as np
import pytest

from contracts import forward
from contracts.functions import BY_PLACE
from numba_flash import testing


@pytest.fixture
def float32(rung):
    if rung.dtype != "float32":
        pytest.skip("what float32 is made of two parts for")
    return rung


def test_all_options_and_a_group_in_one_tile(rung):
    rung.check(
        rung.problem(5, 70, heads=8, heads_kv=2, head_dim=20, head_dim_v=37),
        causal=True, window=(60, 3), seqlens_k=np.array([70, 41], np.int32), q_offset=np.array([60, -2], np.int32),
        softcap=3.0, scale=0.7, alibi_slopes=np.linspace(0.1, 0.8, 8).astype(np.float32),
    )  # fmt: skip


# What is read for each score, or asked about it: a bias in either dtype, broadcast; a mask; functions with arrays;
# heads that share a tile; and all that goes with them.
READ = {
    "bias": lambda rng: dict(
        bias=rng.standard_normal((5, 41), dtype=np.float32), softcap=2.0, causal=True, q_offset=30
    ),
    "bias of its dtype": lambda rng: dict(bias=rng.standard_normal((8, 1, 41)), sinks=np.linspace(-1, 2, 8), scale=0.3),
    "mask": lambda rng: dict(mask=rng.random((1, 8, 5, 41)) < 0.6, seqlens_k=np.array([37], np.int32), dropout_p=0.3),
    "key padding": lambda rng: dict(mask=(np.arange(41) % 32 > 20)[None, None, None], bias=np.float32([[3.0]])),
    "functions": lambda rng: dict(**BY_PLACE, window=(25, 3), q_offset=33),
    "all": lambda rng: dict(
        **BY_PLACE, mask=rng.random((5, 41)) < 0.9, bias=rng.standard_normal((8, 5, 41), dtype=np.float32), softcap=2.0
    ),
}


@pytest.mark.parametrize("how", READ)
def test_what_is_read_or_asked_for_each_score(rung, how):
    options = READ[how](np.random.default_rng(4))
    for name in ("bias", "sinks"):
        if name in options and options[name].dtype == np.float64:
            options[name] = options[name].astype(rung.dtype)
    options |= dict(seed=7) if "dropout_p" in options else {}
    options["aux"] = (*options["aux"][:1], np.linspace(-0.2, 0.3, 8, dtype=np.float32)) if "aux" in options else ()
    rung.check(rung.problem(5, 41, batch=1, heads=8, heads_kv=2, head_dim=20), **options)


# A bias beside which all that a float32 has behind the point is lost, or one so small that it counts alone.
def test_a_large_bias_is_exact(rung):
    case = rung.problem(9, 20, batch=1, heads=1, bias=np.array([[1e30]], rung.dtype))
    assert forward.same_bits(
        rung(case)[0], rung(rung.problem(9, 20, batch=1, heads=1, bias=case.options["bias"] - 0))[0]
    )
    rung.check(case)


# Rows that meet NaN are computed again, with bias, mask and functions.
@pytest.mark.parametrize("how", ["mask", "functions"])
def test_nan_behind_a_mask(rung, how):
    case = rung.problem(6, 20, batch=1, heads=1, head_dim=4, bias=np.full((6, 20), 0.5, np.float32))
    shown = np.arange(6)[:, None] + np.arange(20) != 19  # of key 16 all but query 3
    case.options |= dict(score_mod=lambda s, b, h, i, j: s + 0.01 * j) if how == "functions" else {}
    case.options |= (
        dict(mask_mod=lambda b, h, i, j: i - 14 + j != 19) if how == "functions" else dict(mask=shown[None, None])
    )
    case.v[0, 0, 16, 1] = np.nan
    rung.check(case)
    o, _ = rung(case)
    assert np.isfinite(o[0, 0, 3]).all() and np.isnan(o[0, 0, :3, 1]).all()


# Scores from products of numbers near both ends of float32, and of those that tf32 rounds up to Inf.
@pytest.mark.parametrize(("of_q", "of_k"), [(1e18, 1e-18), (1e-30, 1e30), (3.4028e38, 1e-38)], ids=lambda x: f"{x:g}")
def test_numbers_of_any_size(float32, of_q, of_k):
    case = float32.problem(9, 40, batch=1, heads=1, head_dim=16, scale=0.25)
    case.q[...] = (np.sign(case.q) * of_q).astype(np.float32)
    case.k *= np.float32(of_k)
    assert np.isfinite(case.q).all() and (case.q != 0).all()
    float32.check(case)


def test_terms_that_cancel(float32):
    case = float32.problem(9, 40, batch=1, heads=1, head_dim=32, scale=1.0)
    case.q[..., 16:], case.k[..., 16:] = 300 * case.q[..., :16], case.k[..., :16]
    case.q[..., :16] *= -299
    float32.check(case)


# The tensor core cuts sums off: in one accumulator a long sum of equal signs would be too small by half a unit a step.
def test_long_sums_do_not_drift(float32):
    case = float32.problem(16, 800, batch=1, heads=1, head_dim=16, head_dim_v=32, scale=0.0)
    case.v[...] = np.abs(case.v) + 1
    o, _ = float32(case)
    right, _ = testing.oracle(case)
    assert abs((o.astype(np.float64) - right).mean()) < testing.EPS["float32"] * np.abs(right).max()


# What tf32 rounds up to Inf, and Inf itself, have no small part; such rows are computed again, with a maximum and a
# sum of their own, and their lse with them.
@pytest.mark.parametrize("value", [np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_has_no_small_part(float32, where, value):
    case = float32.problem(6, 20, batch=1, heads=1, head_dim=4, causal=True, q_offset=0, scale=1e-38)
    case.q *= np.float32(0.1)  # so that no product is beyond float32
    case.k *= np.float32(0.1)
    getattr(case, where)[0, 0, 3, 1] = value
    float32.check(case)


# A sum of weights times values is divided at the end. Where it was Inf the row is computed again, with smaller weights.
@pytest.mark.parametrize("options", [{}, dict(sinks=np.ones(1)), dict(causal=True)], ids=["plain", "sink", "causal"])
def test_values_near_the_largest_number(rung, options):
    if "sinks" in options:
        options = dict(sinks=options["sinks"].astype(rung.dtype))
    case = rung.problem(6, 40, batch=1, heads=1, head_dim=8, **options)
    case.v[...] = np.where(np.arange(8) % 2, 1.5, -1.5)
    o, lse = rung(case)
    size = np.ldexp(np.ones(1, rung.dtype), np.finfo(rung.dtype).maxexp - 1)
    case.v *= size
    large, lse_of_large = rung(case)
    # Of each: the roundings of 40 sums, of 2^x, of the score and of the division.
    bound = 2 * 50 * testing.EPS[rung.dtype]
    assert (np.abs(large / size - o) <= bound * np.abs(o)).all()
    assert (np.abs(lse_of_large - lse) <= bound * (1 + np.abs(lse))).all()
