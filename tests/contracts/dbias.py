"""The gradient of bias on tensor cores, for whatever kernel the fixture `dbias_rung` holds, as in forward.py."""

import numpy as np
import pytest

from contracts.backward import incoming
from contracts.functions import BY_PLACE
from numba_flash import testing

Q, K = "seqlen_q", "seqlen_k"


def lengths(rung, even=False):
    """Three tiles of either side, cut at both ends; even: rows of a bias hold whole pairs of numbers."""
    seqlen_q, seqlen_k = (35, 37) if rung.slow else (135, 149)
    return seqlen_q, seqlen_k + even


def biased(rung, shape, dtype="float16", bias_dtype="float32", even=False, **options):
    """shape: of bias, with Q and K in the place of lengths."""
    sizes = dict(zip((Q, K), lengths(rung, even), strict=True))
    shape = tuple(sizes.get(n, n) for n in shape)
    bias = (
        np.random.default_rng(2).standard_normal(shape).astype(testing.strided(np.zeros(1), bias_dtype, "plain").dtype)
    )
    case = rung.problem(*sizes.values(), batch=2, heads=2, heads_kv=1, head_dim=8, dtype=dtype, bias=bias)
    case.options |= options
    return case


def check(rung, case, given=None):
    """dbias alone: other kernels have tests of their own."""
    given = given or incoming(case, 3)
    found = rung(case, given, ("dbias",))
    testing.check_gradients(case, found, *given, rung.kernel)
    return found.dbias


# The axes that are broadcast, each by itself and together.
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape", [(2, 2, Q, K), (1, 2, Q, K), (2, 1, Q, K), (2, 2, 1, K), (2, 2, Q, 1), (K,), (1, 1, Q, 1), ()], ids=str
)
def test_every_broadcast(dbias_rung, shape, bias_dtype):
    assert check(dbias_rung, biased(dbias_rung, shape, "bfloat16", bias_dtype)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pairs_of_16_bits(dbias_rung, dtype):
    case = biased(dbias_rung, (2, 2, Q, K), dtype, dtype, even=True)
    assert check(dbias_rung, case).any() and np.array_equal(check(dbias_rung, case), check(dbias_rung, case))


def beside(rung, which):
    """What goes with a bias: all that says which keys, all that changes a score, dropout, functions."""
    seqlen_q, seqlen_k = lengths(rung)
    mask = np.random.default_rng(7).random((2, 1, seqlen_q, seqlen_k)) < 0.8
    return {
        "lengths": dict(
            seqlens_k=np.array([seqlen_k, seqlen_k // 2], np.int32),
            q_offset=np.array([20, -3], np.int32),
            window=(12, 4),
        ),
        "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4, mask=mask),
        "dropout": dict(dropout_p=0.3, seed=5, causal=True),
        "functions": dict(BY_PLACE, softcap=3.0, mask=mask, dropout_p=0.2, seed=3),
    }[which]


@pytest.mark.parametrize("shape", [(1, 2, Q, K), (2, 1, 1, K)], ids=str)
@pytest.mark.parametrize("which", ["lengths", "scores", "dropout", "functions"])
def test_dbias_with_all_else(dbias_rung, which, shape):
    assert check(dbias_rung, biased(dbias_rung, shape, "bfloat16", **beside(dbias_rung, which))).any()


# A weight of 0 gives nothing, whatever its key holds; nor does a row that sees no key.
@pytest.mark.parametrize(("where", "by"), [("k", "mask"), ("v", "mask"), ("v", "bias")])
def test_what_is_hidden_never_reaches_dbias(dbias_rung, where, by):
    mask = np.ones((1, 1, *lengths(dbias_rung)), bool)
    mask[..., 13], mask[:, :, 4] = by != "mask", False
    case = biased(dbias_rung, (2, 2, Q, K), mask=mask)
    if by == "bias":
        case.options["bias"][..., 13] = -np.inf
    given = incoming(case, 3)
    getattr(case, where)[:, :, 13] = np.nan
    found = check(dbias_rung, case, given)
    assert np.isfinite(found).all() and not found[..., 13].any() and not found[:, :, 4].any() and found.any()


# head_dim over several panels, and another one of v.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 136), (136, 16)])
def test_dbias_of_large_head_dim(dbias_rung, head_dim, head_dim_v):
    case = dbias_rung.problem(18, 20, batch=1, heads=1, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v)
    case.options["bias"] = np.zeros((1, 1, 18, 20), np.float32)
    assert check(dbias_rung, case).any()


def test_a_query_that_sees_no_key_adds_nothing(dbias_rung):
    """In a tile whose queries see all keys, but for the bias."""
    case = biased(dbias_rung, (2, Q, K))
    case.options["bias"][:, 3] = -np.inf
    given = incoming(case, 3)
    given[0][:, :, 3] = np.nan
    found = check(dbias_rung, case, given)
    assert not found[:, 3].any() and found[:, 4].any()
