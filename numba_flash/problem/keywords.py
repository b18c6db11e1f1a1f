"""Keyword arguments that a function does not have. The error says what is used here instead."""

import difflib
from collections.abc import Iterable

# Names in torch, flash-attn, JAX, xFormers, vLLM and Transformers.
INSTEAD = {
    "attn_bias": "bias, which is added to the scores",
    "attn_mask": "mask for bool, True = attend, or bias for numbers that are added to the scores",
    "attention_mask": "mask for bool, True = attend, or bias for numbers that are added to the scores",
    "block_table": "page_table of attention_kvcache",
    "cache_seqlens": "seqlens_k",
    "cu_seqlens": "cu_seqlens_q of attention_varlen",
    "cu_seqlens_k": "cu_seqlens_k of attention_varlen",
    "cu_seqlens_q": "cu_seqlens_q of attention_varlen",
    "deterministic": "nothing: results always are",
    "dropout": "dropout_p, with seed",
    "enable_gqa": "nothing: heads of k and v may be fewer than those of q, and are shared",
    "implementation": "kernel",
    "is_causal": "causal; its last query sees the last key. With q_offset=0 query 0 sees key 0 alone, as in torch",
    "key_padding_mask": "seqlens_k, or mask[:, None, None, :] with True = attend",
    "key_value_seq_lengths": "seqlens_k",
    "local_window_size": "window=(left, right)",
    "logits_soft_cap": "softcap",
    "mask": "mask_mod with aux",
    "need_weights": "numba_flash.weights",
    "bias": "score_mod with aux",
    "qkv_format": 'layout="bhsd" or "bshd"',
    "return_attn_probs": "return_lse, and numba_flash.weights",
    "return_softmax_lse": "return_lse",
    "s_aux": "sinks",
    "sliding_window": "window=(left, right), the keys before and after a query: a window of n keys is (n - 1, 0)",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "window_size": "window=(left, right); None is unbounded, and not -1",
}


def unexpected(function: str, name: str, own: Iterable[str] = ()) -> TypeError:
    """The error for a keyword argument that the function does not have; `own` are those that it has."""
    instead = INSTEAD.get(name)
    if instead is None and own:
        instead = next(iter(difflib.get_close_matches(name, [*own], 1, cutoff=0.7)), None)
    said = f"{function}() got an unexpected keyword argument {name!r}"
    return TypeError(f"{said}: use {instead}" if instead else said)
