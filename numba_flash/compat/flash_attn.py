"""The signature of flash-attn 2.8."""

from typing import Any

from .. import api


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func for arrays of any kind, float32 and float64 and any head_dim too.

    >>> o = flash_attn_func(q, k, v, causal=True, window_size=(127, 0))

    q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, heads_kv, head_dim); v: likewise with head_dim_v.
    The last query stands at the last key. window_size is (left, right), inclusive, -1 = unbounded; softcap 0 or
    less = none; alibi_slopes (heads,) or (batch, heads) in float32. Gradients for torch tensors, as there.
    deterministic: either; the same call always gives the same bits.
    return_attn_probs: return (o, lse, None), lse (batch, heads, seqlen_q); as in flash-attn without dropout, there
    are no probabilities.

    Raises NotImplementedError for dropout_p other than 0, and whatever `numba_flash.attention` raises.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p must be 0.0, dropout is not implemented yet, not {dropout_p!r}")
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ValueError(f"window_size must be a pair (left, right) with -1 for unbounded, not {window_size!r}")
    left, right = (None if side == -1 else side for side in window_size)
    found = api.attention(
        q, k, v, causal=causal, window=(left, right), scale=softmax_scale, softcap=softcap if softcap > 0 else None,
        alibi_slopes=alibi_slopes, layout="bshd", return_lse=return_attn_probs,
    )  # fmt: skip
    return (*found, None) if return_attn_probs else found
