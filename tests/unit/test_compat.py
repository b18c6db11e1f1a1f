"""flash-attn's signature, on NumPy arrays: its layout, defaults and alignment against the formula."""

import inspect

import numpy as np
import pytest

from numba_flash.compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal((2, seqlen, heads, 16)) for seqlen, heads in ((5, 4), (9, 2), (9, 2)))

DEFAULTS = dict(
    dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
)  # fmt: skip


def formula(causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, softmax_scale=None):
    """As flash-attn describes it: query i stands at key i + seqlen_k - seqlen_q."""
    k, v = (np.repeat(x, 2, axis=2) for x in (K, V))
    s = np.einsum("bqhd,bkhd->bhqk", Q, k) * (16**-0.5 if softmax_scale is None else softmax_scale)
    s = softcap * np.tanh(s / softcap) if softcap > 0 else s
    distance = np.arange(9) - (np.arange(5)[:, None] + 9 - 5)
    if alibi_slopes is not None:
        s = s - np.broadcast_to(alibi_slopes, (2, 4))[:, :, None, None] * np.abs(distance)
    left, right = (np.inf if side == -1 else side for side in window_size)
    s = np.where((distance >= -left) & (distance <= (0 if causal else right)), s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.einsum("bhqk,bkhd->bqhd", np.exp(s - lse[..., None]), v), lse


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(causal=True, window_size=(3, 2), softmax_scale=0.5),
        dict(window_size=(-1, 1), softcap=2.0, deterministic=True),
        dict(window_size=(2, -1)),
        dict(alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0625], np.float32), causal=True),
        dict(alibi_slopes=RNG.random((2, 4)).astype(np.float32), softcap=-1.0),
    ],
)
def test_flash_attn_func(options):
    expected, expected_lse = formula(**{name: x for name, x in options.items() if name != "deterministic"})
    assert np.allclose(flash_attn_func(Q, K, V, **options), expected, rtol=1e-12, atol=1e-12)
    o, lse, probabilities = flash_attn_func(Q, K, V, return_attn_probs=True, **options)
    assert np.allclose(o, expected, rtol=1e-12, atol=1e-12) and probabilities is None
    assert np.allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


ENDS = np.array([0, 0, 9, 20], np.int32)


@pytest.mark.parametrize("options", [{}, dict(causal=True, window_size=(3, -1)), dict(softcap=2.0, softmax_scale=0.5)])
def test_packed_sequences_with_the_signatures_of_flash_attn(options):
    q, k, v = (RNG.standard_normal((20, 2, 8)) for _ in range(3))
    o, lse, nothing = flash_attn_varlen_func(q, k, v, ENDS, ENDS, 11, 20, return_attn_probs=True, **options)
    assert nothing is None and lse.shape == (2, 20)
    for first, end in ((0, 9), (9, 20)):
        own = (x[None, first:end] for x in (q, k, v))
        assert np.allclose(o[first:end], flash_attn_func(*own, **options)[0], rtol=1e-12, atol=1e-12)
    packed = flash_attn_varlen_qkvpacked_func(np.stack([q, k, v], 1), ENDS, 11, **options)
    halves = flash_attn_varlen_kvpacked_func(q, np.stack([k, v], 1), ENDS, ENDS, 11, 11, **options)
    assert np.array_equal(packed, o) and np.array_equal(halves, o)


def test_what_the_packed_signatures_refuse():
    x = np.zeros((20, 2, 8))
    with pytest.raises(NotImplementedError, match="block_table"):
        flash_attn_varlen_func(x, x, x, ENDS, ENDS, 11, 11, block_table=ENDS)
    with pytest.raises(ValueError, match="window_size"):
        flash_attn_varlen_func(x, x, x, ENDS, ENDS, 11, 11, window_size=3)
    with pytest.raises(ValueError, match=r"qkv must have shape \(total, 3, heads, head_dim\), not \(20, 2, 8\)"):
        flash_attn_varlen_qkvpacked_func(x, ENDS, 11)
    assert list(inspect.signature(flash_attn_varlen_func).parameters) == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", *DEFAULTS, "block_table",
    ]  # fmt: skip


def test_the_signature_is_that_of_flash_attn():
    defaults = {name: about.default for name, about in inspect.signature(flash_attn_func).parameters.items()}
    assert list(defaults) == ["q", "k", "v", *DEFAULTS] and {name: defaults[name] for name in DEFAULTS} == DEFAULTS
    everything = flash_attn_func(Q, K, V, 0.0, 0.5, True, (3, 0), 2.0, None, False, False)
    expected, _ = formula(softmax_scale=0.5, causal=True, window_size=(3, 0), softcap=2.0)
    assert np.allclose(everything, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            dict(dropout_p=0.1),
            NotImplementedError,
            "for other arrays call numba_flash.attention with",
        ),
        (dict(dropout_p=1), ValueError, "dropout_p is a probability"),
        (dict(dropout_p=None), TypeError, "dropout_p"),
        (dict(dropout_p=np.array(0.0)), TypeError, "dropout_p must be a number"),
        (dict(window_size=4), ValueError, "window_size"),
        (dict(window_size=(-2, 0)), ValueError, "window_size must be a pair .* or -1 for unbounded, not .-2, 0"),
        (dict(window_size=(1.0, 0)), TypeError, "window_size"),
        (dict(window_size=(True, 0)), TypeError, "window_size"),
        (dict(softmax_scale=np.array(0.5)), TypeError, "write softmax_scale=float"),
        (dict(softmax_scale="0.5"), TypeError, "softmax_scale must be a number"),
        (dict(softcap=np.array(1.0)), TypeError, "softcap must be a number"),
        (dict(softcap=None), TypeError, "softcap"),
        (dict(softcap=np.nan), ValueError, "softcap must be finite"),
        (dict(causal=1), TypeError, "causal"),
        (dict(deterministic=1), TypeError, "deterministic"),
        (dict(return_attn_probs=1), TypeError, "return_attn_probs"),
        (dict(q=Q[0]), ValueError, "k must have 3 dimensions, not shape"),
        (dict(alibi_slopes=np.ones(3, np.float32)), ValueError, "alibi_slopes"),
    ],
)
def test_what_flash_attn_func_refuses(options, error, words):
    with pytest.raises(error, match=words):
        flash_attn_func(**(dict(q=Q, k=K, v=V) | options))
