"""dropout_p and seed, for whatever kernels the fixtures `rung` and `backward_rung` hold, as in forward.py."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from contracts import backward
from contracts.metamorphic import both_same
from numba_flash import testing
from numba_flash.machine import toolchain

# The simulator makes random words in Python, a millisecond each: half the queries and keys, and heads.
LIMITS = dict(max_seqlen=35 if toolchain.simulated() else 70, max_batch=2)
SIZES = (18, 52) if toolchain.simulated() else (37, 100)
HEADS = dict(heads=2, heads_kv=1) if toolchain.simulated() else dict(heads=4, heads_kv=2)


def limits_of(rung):
    limits = rung.limits | LIMITS
    return limits | dict(features=(*limits.get("features", testing.FEATURES), testing.SEEDED))


@given(st.data())
def test_random_problems_with_dropout_agree_with_the_oracle(rung, data):
    rung.check(data.draw(testing.cases(**limits_of(rung))))


@given(st.data())
def test_gradients_with_dropout_agree_with_the_oracle(backward_rung, data):
    case = data.draw(testing.cases(**limits_of(backward_rung)))
    backward_rung.check(case, backward.incoming(case, data.draw(st.integers(0, 100))))


# Several tiles of every kernel, and groups of 32 keys that tiles of 16 begin in the middle of.
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize(
    "options", [dict(), dict(causal=True, window=(40, 0), q_offset=-3, softcap=4.0)], ids=["", "all"]
)
def test_dropout_in_every_dtype(rung, dtype, options):
    case = rung.problem(*SIZES, **HEADS, head_dim=8, batch=rung.batch, dtype=dtype)
    rung.check(case, **options, dropout_p=0.3, seed=2**63 + 11)


@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("options", [dict(), dict(causal=True, q_offset=50, softcap=4.0)], ids=["", "all"])
def test_gradients_with_dropout_in_every_dtype(backward_rung, dtype, options):
    case = backward_rung.problem(*SIZES, **HEADS, head_dim=8, batch=backward_rung.batch, dtype=dtype)
    backward_rung.check(case, **options, dropout_p=0.3, seed=2**63 + 11)


@pytest.mark.parametrize("q_offset", [None, 7, -9])
def test_what_counts_follows_from_seed_and_position_alone(rung, q_offset):
    """Equal weights and V = 1: o shows which count. Parts of the problem show the same ones."""
    case = rung.problem(20, 64, **HEADS, head_dim=8, head_dim_v=64, batch=rung.batch)
    case.q[...] = 0
    case.v[...] = np.eye(64)
    case.options |= dict(dropout_p=0.5, seed=123456789) | (dict(q_offset=q_offset) if q_offset is not None else {})
    o, _ = rung(case)
    mask = testing.dropout_mask((rung.batch, HEADS["heads"], 20, 64), 0.5, 123456789, q_offset)
    assert np.array_equal(o != 0, mask) and np.allclose(o[mask], 2 / 64, rtol=1e-3)
    case.q, case.options["q_offset"] = case.q[:, :, 5:], (44 if q_offset is None else q_offset) + 5
    part, _ = rung(case)
    assert np.array_equal(part != 0, mask[:, :, 5:])


def test_dropout_of_next_to_nothing_is_none(rung):
    """Where p is less than half of 2^-16 nothing is dropped, and nothing counts more than once."""
    case = rung.problem(20, 40, head_dim=8, causal=True)
    assert both_same(rung(case, dropout_p=2**-18, seed=1), rung(case, dropout_p=1e-12, seed=2))
    rung.check(case, dropout_p=2**-18, seed=1)
    assert both_same(rung(case, dropout_p=0.0, seed=1), rung(case))


def test_dropout_of_next_to_all_leaves_something(rung):
    """p counts in steps of 2^-16 and stays below 1: what counts then counts 2^16 times."""
    case = rung.problem(20, 40, head_dim=8, causal=True)
    rung.check(case, dropout_p=1 - 1e-9, seed=1)


def test_lse_is_that_without_dropout(rung):
    case = rung.problem(20, 40, head_dim=8, causal=True)
    lse, without = rung(case, dropout_p=0.8, seed=1)[1], rung(case)[1]
    assert np.allclose(lse, without, rtol=1e-5, atol=1e-5)


def test_what_is_dropped_never_reaches_o(rung):
    """Not even NaN: a row is NaN where some weight of a key counts whose V is."""
    case = rung.problem(20, 40, head_dim=8, head_dim_v=8, batch=1)
    case.options |= dict(dropout_p=0.5, seed=4)
    case.v[:, :, 17] = np.nan
    o, _ = rung(case)
    assert np.array_equal(np.isnan(o).any(-1), testing.dropout_mask((1, 2, 20, 40), 0.5, 4)[..., 17])
    assert np.isfinite(o).any() and np.isnan(o).any()


def test_no_batch_entry_knows_of_another(rung):
    case = rung.problem(9, 40, head_dim=8, batch=2)
    case.options |= dict(dropout_p=0.5, seed=4)
    together = rung(case)
    case.q, case.k, case.v = case.q[:1], case.k[:1], case.v[:1]
    assert both_same(rung(case), tuple(x[:1] for x in together))
