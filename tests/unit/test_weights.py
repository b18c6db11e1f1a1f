"""lse alone, the weights, what each key receives, and facts of each row: beside P by values that are the identity."""

import numpy as np
import pytest

import numba_flash
from numba_flash import mods

rng = np.random.default_rng(0)
BATCH, HEADS, HEADS_KV, ROWS, KEYS, DIM = 2, 4, 2, 9, 11, 8


def drawn(*shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


q, k = drawn(BATCH, HEADS, ROWS, DIM), drawn(BATCH, HEADS_KV, KEYS, DIM)
v = drawn(BATCH, HEADS_KV, KEYS, 6)
TABLE = drawn(KEYS)
OPTIONS = {
    "plain": dict(scale=0.5, softcap=3.0),
    "causal": dict(causal=True),
    "window and offset": dict(window=(3, 2), q_offset=1),
    "offsets": dict(causal=True, q_offset=np.array([0, 4], np.int32)),
    "lengths": dict(seqlens_k=np.array([0, 7], np.int32), causal=True, alibi_slopes=drawn(HEADS)),
    "bias": dict(bias=drawn(HEADS, ROWS, KEYS), sinks=drawn(HEADS)),
    "bias of rows": dict(bias=drawn(BATCH, 1, ROWS, 1)),
    "bias of keys": dict(bias=drawn(1, KEYS)),
    "mask": dict(mask=rng.random((BATCH, 1, ROWS, KEYS)) > 0.4, sinks=drawn(BATCH, HEADS)),
    "a function": dict(score_mod=lambda s, b, h, i, j, t: s * (h + 1) + t[j], aux=(TABLE,)),
    "rows of q": dict(score_mod=lambda s, b, h, i, j, q_index, t: s + t[q_index], aux=(TABLE,)),
}
KERNELS = ("cpu", "reference")
ALL = numba_flash.block_mask(lambda b, h, i, j: True, BATCH, HEADS, ROWS, KEYS)
SHORTER = numba_flash.block_mask(mods.causal, BATCH, HEADS, ROWS, KEYS - 1)


def identity():
    return np.broadcast_to(np.eye(KEYS, dtype=np.float32), (BATCH, HEADS_KV, KEYS, KEYS))


@pytest.fixture(scope="module", params=OPTIONS)
def asked(request):
    """The options, P, and lse."""
    options = OPTIONS[request.param]
    p, lse = numba_flash.attention(q, k, identity(), **options, return_lse=True)
    return options, p, lse


@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_are_those_that_values_meet(asked, kernel):
    options, p, lse = asked
    found = numba_flash.weights(q, k, lse, **options, kernel=kernel)
    assert found.dtype == np.float32 and found.shape == p.shape
    np.testing.assert_allclose(found, p, atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_part_is_a_part_of_the_whole(asked, kernel):
    options, p, lse = asked
    by_row = options is OPTIONS["rows of q"]
    for rows, heads in ((slice(3, 7), None), (None, slice(2, 4)), (slice(-2, None), slice(1, 2)), (slice(4, 4), None)):
        refused = rows is not None and by_row or heads is not None and "score_mod" in options
        if refused:
            with pytest.raises(NotImplementedError, match="rows: a function asks|heads: functions are told h"):
                numba_flash.weights(q, k, lse, rows=rows, heads=heads, **options, kernel=kernel)
            continue
        found = numba_flash.weights(q, k, lse, rows=rows, heads=heads, **options, kernel=kernel)
        np.testing.assert_allclose(found, p[:, heads or slice(None), rows or slice(None)], atol=2e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_column_sums(asked, kernel):
    options, p, lse = asked
    found = numba_flash.column_sums(q, k, lse, **options, kernel=kernel)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, p.sum(-2), atol=5e-6)


@pytest.mark.parametrize("at_once", [1, 2**26])
def test_row_statistics(asked, at_once, monkeypatch):
    monkeypatch.setattr("numba_flash.api.weights.AT_ONCE", at_once)
    monkeypatch.setattr("numba_flash.api.weights.FEWEST", 4)
    options, p, lse = asked
    found = numba_flash.row_statistics(q, k, lse, **options)
    p, seen = p.astype(np.float64), p.any(-1)
    entropy = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)
    np.testing.assert_allclose(found.entropy, entropy, atol=5e-6)
    largest = lse + np.log(np.where(seen, p.max(-1), 1))
    np.testing.assert_allclose(found.max_logit[seen], largest[seen], atol=5e-6)
    assert np.isneginf(found.max_logit[~seen]).all()


def test_the_largest_score_is_that_of_the_formula():
    lse = numba_flash.attention_lse(q, k, scale=3.0)
    scores = 3 * np.einsum("bhid,bhjd->bhij", q, k.repeat(2, 1))
    np.testing.assert_allclose(numba_flash.row_statistics(q, k, lse, scale=3.0).max_logit, scores.max(-1), atol=2e-5)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lse_alone_and_values_of_no_columns(asked, kernel):
    options, _, lse = asked
    np.testing.assert_allclose(numba_flash.attention_lse(q, k, **options, kernel=kernel), lse, atol=2e-6)
    o, also = numba_flash.attention(q, k, v[..., :0], **options, kernel=kernel, return_lse=True)
    assert o.shape == (BATCH, HEADS, ROWS, 0) and o.dtype == np.float32
    np.testing.assert_allclose(also, lse, atol=2e-6)
    assert numba_flash.attention(q, k, v[..., :0], **options, kernel=kernel).shape == (BATCH, HEADS, ROWS, 0)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("batch", [None, (), (2, 3)], ids=str)
def test_other_dimensions(batch, layout):
    heads = () if batch is None else (HEADS,)
    shape = (*(batch or ()), *heads, ROWS, DIM)
    x = drawn(*shape) if layout == "bhsd" or batch is None else drawn(*(batch or ()), ROWS, HEADS, DIM)
    lse = numba_flash.attention_lse(x, x, layout=layout)
    bhsd = x if layout == "bhsd" or batch is None else np.moveaxis(x, -2, -3)
    scores = bhsd @ np.swapaxes(bhsd, -1, -2) * DIM**-0.5
    p = np.exp(scores - lse[..., None])
    np.testing.assert_allclose(numba_flash.weights(x, x, lse, layout=layout), p, atol=2e-6)
    found = numba_flash.weights(x, x, lse, layout=layout, rows=slice(2, 5))
    np.testing.assert_allclose(found, p[..., 2:5, :], atol=2e-6)
    np.testing.assert_allclose(numba_flash.column_sums(x, x, lse, layout=layout), p.sum(-2), atol=5e-6)
    np.testing.assert_allclose(
        numba_flash.row_statistics(x, x, lse, layout=layout).max_logit, scores.max(-1), atol=5e-6
    )


@pytest.mark.parametrize("bias", [None, drawn(1, KEYS)], ids=["plain", "bias"])
def test_no_rows_and_no_heads_of_one(bias):
    one, of_k = q[:, :1, :1], k[:, :1]
    lse = numba_flash.attention_lse(one, of_k, bias=bias)
    assert numba_flash.weights(one, of_k, lse, bias=bias, rows=slice(1, 1)).shape == (BATCH, 1, 0, KEYS)
    assert numba_flash.weights(one, of_k, lse, bias=bias, heads=slice(0, 0)).shape == (BATCH, 0, 1, KEYS)


def test_a_block_mask_is_the_mask_that_it_describes():
    blocks = numba_flash.block_mask(mods.sliding_window(2), BATCH, HEADS, ROWS, KEYS, causal=True)
    p, lse = numba_flash.attention(q, k, identity(), block_mask=blocks, return_lse=True)
    np.testing.assert_allclose(
        numba_flash.weights(q, k, lse, block_mask=blocks, rows=slice(2, 6)), p[:, :, 2:6], atol=2e-6
    )


@pytest.mark.parametrize("sizes", [(0, KEYS), (ROWS, 0), (0, 0)])
def test_sizes_of_0(sizes):
    few, none = q[:, :, : sizes[0]], k[:, :, : sizes[1]]
    lse = numba_flash.attention_lse(few, none)
    assert numba_flash.weights(few, none, lse).shape == (BATCH, HEADS, *sizes)
    assert not numba_flash.column_sums(few, none, lse).any()
    found = numba_flash.row_statistics(few, none, lse)
    assert found.entropy.shape == lse.shape and not found.entropy.any() and np.isneginf(found.max_logit).all()


@pytest.mark.parametrize("of_bias", [np.float16, np.float32])
def test_of_16_bits_weights_are_in_float32(of_bias):
    x, bias = drawn(1, 1, 5, 4).astype(np.float16), drawn(5, 5).astype(of_bias)
    lse = numba_flash.attention_lse(x, x, bias=bias)
    p, right = numba_flash.weights(x, x, lse, bias=bias), x.astype(np.float32)
    assert p.dtype == np.float32
    scores = right @ right.swapaxes(2, 3) / 2 + bias.astype(np.float32)
    np.testing.assert_allclose(p, np.exp(scores - lse[..., None]), atol=2e-6)


def test_float64_stays_float64():
    x = drawn(1, 1, 5, 4, dtype=np.float64)
    lse = numba_flash.attention_lse(x, x)
    p = numba_flash.weights(x, x, lse)
    assert p.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-14)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (dict(rows=3), TypeError, "rows must be a slice or None, not 3"),
        (dict(rows=slice(0, 8, 2)), ValueError, "rows must be a slice without steps"),
        (dict(heads=slice(1, 3)), ValueError, "heads from 1 to 3 must lie inside of the 2 that share a head of k"),
        (dict(dropout_p=0.1), TypeError, "'dropout_p' is no option here"),
        (dict(stream=0), TypeError, "'stream' is no option here"),
        (dict(lse=drawn(BATCH, HEADS, KEYS)), ValueError, "lse must have shape"),
        (dict(block_mask=3), TypeError, "block_mask must be what numba_flash.block_mask returns"),
        (dict(q=memoryview(b"")), NotImplementedError, "q must be an array of NumPy, CuPy, torch or JAX"),
        (dict(lse=None), NotImplementedError, "lse must be an array of NumPy, CuPy, torch or JAX, not NoneType"),
        (dict(bias=[[1.0]]), NotImplementedError, "bias must be an array of NumPy, CuPy, torch or JAX, not list"),
        (dict(bias=np.ones((ROWS, KEYS), bool)), TypeError, "bias must be float32 or q's dtype, float32, not bool"),
        (dict(bias=np.ones((ROWS, KEYS))), TypeError, "bias must be float32 or q's dtype, float32, not float64"),
        (
            dict(bias=drawn(3)),
            ValueError,
            r"bias must be broadcastable to the scores, \(2, 4, 9, 11\), not shape \(3,\)",
        ),
        (dict(bias=drawn(1, 1, 1, ROWS, KEYS)), ValueError, "bias must be broadcastable to the scores"),
        (dict(q=q[0]), ValueError, "q and k must have equally many dimensions"),
        (dict(k=k[0, 0, 0]), ValueError, "q and k must have equally many dimensions"),
        (dict(block_mask=ALL, causal=True), ValueError, "causal must be that of block_mask"),
        (dict(block_mask=ALL, mask_mod=mods.causal), ValueError, "mask_mod must be that of block_mask"),
        (dict(block_mask=SHORTER), ValueError, "block_mask is of .*, and q and k have"),
    ],
)
def test_what_is_wrong_is_named(given, error, words):
    with pytest.raises(error, match=words):
        numba_flash.weights(**(dict(q=q, k=k, lse=np.zeros((BATCH, HEADS, ROWS), np.float32)) | given))


def test_attention_lse_takes_nothing_about_o():
    with pytest.raises(TypeError, match="attention_lse\\(\\) takes no out"):
        numba_flash.attention_lse(q, k, out=q)
    with pytest.raises(TypeError, match="k must be an array"):
        numba_flash.attention_lse(q, [[1.0]])
