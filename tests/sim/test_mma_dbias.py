"""The gradient of bias by mma_dbias, simulated: every way to broadcast a bias, over several tiles, with all else."""

import numpy as np
import pytest
from contract_backward import Rung, incoming
from contract_functions import BY_PLACE

from numba_flash import testing


@pytest.fixture(scope="module")
def rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)


def biased(rung, shape, seqlens=(35, 37), dtype="float16", bias_dtype="float32", **options):
    """Three query tiles and three key tiles of the simulator, cut at both ends."""
    bias = np.random.default_rng(2).standard_normal(shape).astype(bias_dtype)
    case = rung.problem(*seqlens, heads=2, heads_kv=1, head_dim=8, dtype=dtype, bias=bias)
    case.options |= options
    return case


def check(rung, case, given=None):
    """dbias alone: other kernels have tests of their own."""
    given = given or incoming(case, 3)
    found = rung(case, given, ("dbias",))
    testing.check_gradients(case, found, *given, "mma")
    return found.dbias


# The axes that are broadcast, each by itself and together; with 16-bit numbers in pairs, and where a row has no pairs.
@pytest.mark.parametrize("bias_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [(2, 2, 35, 37), (1, 2, 35, 37), (2, 1, 35, 37), (2, 2, 1, 37), (2, 2, 35, 1), (37,), (1, 1, 35, 1), ()],
    ids=str,
)
def test_every_broadcast(rung, shape, bias_dtype):
    assert check(rung, biased(rung, shape, dtype="bfloat16", bias_dtype=bias_dtype)).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_pairs_of_16_bits(rung, dtype):
    case = biased(rung, (2, 2, 35, 38), (35, 38), dtype, dtype)
    assert check(rung, case).any() and np.array_equal(check(rung, case), check(rung, case))


MASK = np.random.default_rng(7).random((2, 1, 35, 37)) < 0.8
BESIDE = {
    "lengths": dict(seqlens_k=np.array([37, 19], np.int32), q_offset=np.array([20, -3], np.int32), window=(12, 4)),
    "scores": dict(softcap=2.0, alibi_slopes=np.array([0.1, 0.3], np.float32), causal=True, scale=0.4, mask=MASK),
    "dropout": dict(dropout_p=0.3, seed=5, causal=True),
    "functions": dict(BY_PLACE, softcap=3.0, mask=MASK, dropout_p=0.2, seed=3),
}


@pytest.mark.parametrize("shape", [(1, 2, 35, 37), (2, 1, 1, 37)], ids=str)
@pytest.mark.parametrize("beside", BESIDE)
def test_all_else(rung, beside, shape):
    assert check(rung, biased(rung, shape, dtype="bfloat16", **BESIDE[beside])).any()


# A weight of 0 gives nothing, whatever its key holds; nor does a row that sees no key.
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_hidden_never_reaches_dbias(rung, where):
    mask = np.ones((1, 1, 35, 37), bool)
    mask[..., 13], mask[:, :, 4] = False, False
    case = biased(rung, (2, 2, 35, 37), mask=mask)
    given = incoming(case, 3)
    getattr(case, where)[:, :, 13] = np.nan
    found = check(rung, case, given)
    assert np.isfinite(found).all() and not found[..., 13].any() and not found[:, :, 4].any() and found.any()


# head_dim over several panels, and another one of v.
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 136), (136, 16)])
def test_wide_heads(rung, head_dim, head_dim_v):
    case = rung.problem(18, 20, batch=1, heads=1, heads_kv=1, head_dim=head_dim, head_dim_v=head_dim_v)
    case.options["bias"] = np.zeros((1, 1, 18, 20), np.float32)
    assert check(rung, case).any()
