"""Gradients of heads whose keys fit into one tile, by one kernel (mma/backward.py with with_dq), simulated."""

import numpy as np
import pytest
from contracts.backward import Rung, incoming, same
from contracts.functions import BY_PLACE

import numba_flash
from numba_flash import testing

WANTED = ("dq", "dk", "dv")


@pytest.fixture(scope="module")
def rung():
    return Rung("mma", testing.rows_padded, tensor=True, tile=16, slow=True)


def kernels(case, wanted=WANTED):
    do, o, lse, dlse = incoming(case)
    explained = numba_flash.explain_backward(
        do, **case.arguments(), o=o, lse=lse, dlse=dlse, kernel="mma", wanted=wanted
    )  # fmt: skip
    return [config.kernel for config in explained.configs]


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(3, 1), softcap=4.0),
    "lengths": dict(seqlens_k=np.array([5, 0], np.int32)),
    "mask": dict(mask=np.random.default_rng(1).random((2, 1, 13, 11)) < 0.5),
    "bias": dict(bias=np.random.default_rng(2).standard_normal((1, 2, 13, 11), dtype=np.float32)),
    "dropout": dict(dropout_p=0.3, seed=5),
    "functions": BY_PLACE,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_with_a_group_of_heads(rung, name):
    case = rung.problem(13, 11, batch=2, heads=2, heads_kv=1, head_dim=24, head_dim_v=8)
    rung.check(case, wanted=WANTED, **OPTIONS[name])
    assert kernels(case)[-1] == "mma_one_key_tile" and "backward_preprocess" in kernels(case)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_with_one_tile_of_queries(rung, name):
    """The block computes lse and delta itself."""
    case = rung.problem(13, 11, batch=2, heads=2, heads_kv=2, head_dim=24, head_dim_v=8)
    rung.check(case, wanted=WANTED, **OPTIONS[name])
    assert kernels(case)[-1] == "mma_one_key_tile" and "backward_preprocess" not in kernels(case)


# Lanes that share a row are one to 16, and some rows go to lanes that have none.
@pytest.mark.parametrize(("seqlen", "head_dim"), [(16, 8), (1, 16), (15, 32), (16, 64), (9, 128)])
def test_one_tile_of_queries_of_each_width(rung, seqlen, head_dim):
    case = rung.problem(seqlen, 16, batch=1, heads=2, heads_kv=2, head_dim=head_dim)
    rung.check(case, wanted=WANTED)
    assert kernels(case) == ["mma_one_key_tile"]


# Past one and two tiles of queries, at and beside the edges of tiles.
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (16, 16), (17, 15), (32, 16), (31, 1)])
def test_lengths(rung, seqlen_q, seqlen_k):
    case = rung.problem(seqlen_q, seqlen_k, batch=1, heads=2, head_dim=16)
    rung.check(case, wanted=WANTED, causal=seqlen_q == 17)
    assert kernels(case) == ["backward_preprocess", "mma_one_key_tile"]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "wanted"), [(33, 16, WANTED), (16, 17, WANTED), (16, 16, ("dq",))])
def test_longer_heads_and_single_gradients_have_the_other_kernels(rung, seqlen_q, seqlen_k, wanted):
    assert "mma_one_key_tile" not in kernels(rung.problem(seqlen_q, seqlen_k, batch=1, heads=1, head_dim=16), wanted)


def test_a_mask_mod_decides_in_every_tile_of_queries(rung):
    """The second tile lies inside the window of all keys, and no key is missing: only the function hides scores."""
    case = rung.problem(32, 16, batch=1, heads=1, head_dim=16)
    rung.check(case, wanted=WANTED, mask_mod=lambda b, h, q_pos, k_pos: (q_pos + k_pos) % 3 != 0)
    assert kernels(case)[-1] == "mma_one_key_tile"


def test_a_row_has_the_same_bits_beside_other_entries(rung):
    case = rung.problem(13, 11, batch=3, heads=2, head_dim=16)
    given = incoming(case)
    alone = rung.problem(13, 11, batch=3, heads=2, head_dim=16)
    alone.q, alone.k, alone.v = case.q[1:2], case.k[1:2], case.v[1:2]
    whole, one = rung(case, given, WANTED), rung(alone, tuple(x[1:2] for x in given), WANTED)
    assert same([x[1:2] for x in whole[:3]], one[:3])


@pytest.mark.parametrize("heads", [1, 2])  # of one KV head: the block computes lse and delta itself, or not
@pytest.mark.parametrize("option", ["seqlens_k", "mask"])
def test_nan_that_no_query_sees_reaches_nothing(rung, heads, option):
    """A mask leaves it in the tile: then rows of dQ are computed again, with their lse and delta."""
    case = rung.problem(13, 11, batch=2, heads=heads, head_dim=16)
    case.k[:, :, 7:], case.v[:, :, 7:] = np.nan, np.inf
    seen = np.array([7, 7], np.int32) if option == "seqlens_k" else np.arange(11) < np.full((2, 1, 13, 1), 7)
    found = rung.check(case, wanted=WANTED, **{option: seen})
    assert np.isfinite(found.dq).all() and not found.dk[:, :, 7:].any()


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_gradients_behind_it_read_its_lse_and_delta(rung, heads_kv):
    case = rung.problem(13, 11, batch=2, heads=2, heads_kv=heads_kv, head_dim=16)
    bias, sinks = np.zeros((1, 2, 13, 11), np.float32), np.array([0.5, -1], np.float32)
    rung.check(case, wanted=(*WANTED, "dbias", "dsinks"), bias=bias, sinks=sinks)
    behind = ["mma_one_key_tile", "mma_dbias", "dsinks_of_blocks"]
    assert kernels(case, (*WANTED, "dbias", "dsinks")) == ["backward_preprocess"] * (heads_kv == 1) + behind


# Rows of dbias that hold whole pairs of numbers, and others; the query that sees no key has a dO that is NaN.
@pytest.mark.parametrize("seqlen_k", [11, 12])
def test_a_bias_of_every_score_gets_its_gradient_there(rung, seqlen_k):
    case = rung.problem(19, seqlen_k, batch=2, heads=2, heads_kv=1, head_dim=24, dtype="bfloat16")
    bias = np.random.default_rng(3).standard_normal((2, 2, 19, seqlen_k)).astype(case.q.dtype)
    bias[:, :, 17] = -np.inf
    case.options |= dict(bias=bias)
    given = incoming(case)
    given[0][:, :, 17] = np.nan
    found = rung(case, given, (*WANTED, "dbias"))
    testing.check_gradients(case, found, *given, rung.kernel)
    assert not found.dbias[:, :, 17].any() and found.dbias[:, :, 16].any()
    assert kernels(case, (*WANTED, "dbias")) == ["backward_preprocess", "mma_one_key_tile"]


# A bias in 16 bits with whole rows of 16 bytes comes with the tile of queries.
@pytest.mark.parametrize("seqlen_k", [16, 8])
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), ()])
def test_a_bias_that_comes_with_the_queries(rung, seqlen_k, shape):
    dtype = "bfloat16" if shape else "float16"
    case = rung.problem(19, seqlen_k, batch=2, heads=2, heads_kv=1, head_dim=24, dtype=dtype)
    case.options["bias"] = np.random.default_rng(3).standard_normal((*shape, 19, seqlen_k)).astype(case.q.dtype)
    do, o, lse, _ = incoming(case)
    made = numba_flash.explain_backward(do, **case.arguments(), o=o, lse=lse, kernel="mma").configs
    assert made[1].bias_boxes and made[1].kernel == "mma_one_key_tile"
    rung.check(case, wanted=WANTED)


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((1, 2, 13, 12), "float16", {}),
        ((2, 2, 13, 12), "float32", {}),
        ((2, 2, 13, 12), "float16", dict(softcap=3.0)),
    ],
)  # fmt: skip
def test_the_gradient_of_other_biases_has_its_own_kernel(rung, shape, dtype, options):
    case = rung.problem(13, 12, batch=2, heads=2, head_dim=24)
    bias = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    rung.check(case, wanted=(*WANTED, "dbias"), bias=bias, **options)
    assert "mma_dbias" in kernels(case, (*WANTED, "dbias"))
