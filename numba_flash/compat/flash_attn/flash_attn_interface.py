"""The signatures of flash-attn 2.8's functions."""

import operator
from typing import Any

import numpy as np

from ...api import forward as api, kvcache, varlen
from ...problem.forward import check_bool
from ..arguments import described, number, probability, refuse_nested, refuse_pages, renamed, window_sides

UNBOUNDED = (-1, -1)
# Defaults are integers; bridges/torch.py gives the reason at NO_DROPOUT.
NAMES = dict(scale="softmax_scale", window="window_size", return_lse="return_attn_probs")


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0,
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
    return_attn_probs: return (o, lse, None), lse (batch, heads, seqlen_q); there are no probabilities.

    dropout_p: from 0 to below 1, for torch tensors: the seed is drawn from torch's default generator in host memory.

    Raises NotImplementedError for dropout of other arrays, and for nested tensors; TypeError and ValueError as
    `numba_flash.attention` does, with the names of these arguments.
    """
    dropout: dict[str, Any] = {}
    if type(dropout_p) not in (int, float) or dropout_p:
        dropout = _dropout(probability("dropout_p", dropout_p), q)
    check_bool("deterministic", deterministic)
    window = None if window_size is UNBOUNDED else window_sides(window_size)
    scale = None if softmax_scale is None else number("softmax_scale", softmax_scale)
    cap = None if type(softcap) in (int, float) and softcap <= 0 else _softcap(softcap)
    if getattr(q, "is_nested", False) or getattr(k, "is_nested", False) or getattr(v, "is_nested", False):
        refuse_nested("Pass its values() and offsets() in int32 to flash_attn_varlen_func", q=q, k=k, v=v)
    try:
        found = api.attention(
            q,
            k,
            v,
            causal=causal,
            window=window,
            scale=scale,
            softcap=cap,
            alibi_slopes=alibi_slopes,
            layout="bshd",
            return_lse=return_attn_probs,
            **dropout,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    return (*found, None) if return_attn_probs else found


def flash_attn_kvpacked_func(q: Any, kv: Any, *others: Any, **named: Any) -> Any:
    """flash_attn.flash_attn_kvpacked_func: kv is (batch, seqlen_k, 2, heads_kv, head_dim). All others: as for
    flash_attn_func."""
    _check_packed("kv", kv, "(batch, seqlen_k, 2, heads_kv, head_dim)")
    return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *others, **named)


def flash_attn_qkvpacked_func(qkv: Any, *others: Any, **named: Any) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: qkv is (batch, seqlen, 3, heads, head_dim). All others: as for
    flash_attn_func."""
    _check_packed("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *others, **named)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func for arrays of any kind, float32 and float64 and any head_dim too.

    >>> o = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, most, most, causal=True)

    q: (total_q, heads, head_dim); k: (total_k, heads_kv, head_dim); v: likewise with head_dim_v. cu_seqlens_q,
    cu_seqlens_k: int32 (batch + 1,). max_seqlen_q, max_seqlen_k: whole numbers, upper bounds of the lengths. A tensor
    of one, as lengths.max() gives, is read as there, which waits for the GPU if it is on one.
    return_attn_probs: return (o, lse, None), lse (heads, total_q); a row without keys has -inf there, and not
    flash-attn's +inf. All others: as for flash_attn_func.

    Raises NotImplementedError for block_table, and for dropout of arrays that are not torch's.
    """
    refuse_pages(block_table)
    check_bool("deterministic", deterministic)
    drops = type(dropout_p) not in (int, float) or dropout_p
    try:
        found = varlen.attention_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q=_read(max_seqlen_q),
            max_seqlen_k=_read(max_seqlen_k),
            causal=causal,
            window=None if window_size is UNBOUNDED else window_sides(window_size),
            scale=None if softmax_scale is None else number("softmax_scale", softmax_scale),
            softcap=None if type(softcap) in (int, float) and softcap <= 0 else _softcap(softcap),
            alibi_slopes=alibi_slopes,
            return_lse=return_attn_probs,
            **(_dropout(probability("dropout_p", dropout_p), q) if drops else {}),
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse_nested("Pass its values(), and its offsets() in int32 as cu_seqlens_q or cu_seqlens_k", q=q, k=k, v=v)
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    return (*found, None) if return_attn_probs else found


def flash_attn_varlen_kvpacked_func(
    q: Any,
    kv: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *others: Any,
    **named: Any,
) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func: kv is (total_k, 2, heads_kv, head_dim). All others: as for
    flash_attn_varlen_func."""
    _check_packed("kv", kv, "(total_k, 2, heads_kv, head_dim)")
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], *ends, *others, **named)


def flash_attn_varlen_qkvpacked_func(qkv: Any, cu_seqlens: Any, max_seqlen: int, *others: Any, **named: Any) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func: qkv is (total, 3, heads, head_dim). All others: as for
    flash_attn_varlen_func."""
    _check_packed("qkv", qkv, "(total, 3, heads, head_dim)")
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(qkv[:, 0], qkv[:, 1], qkv[:, 2], *ends, *others, **named)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = UNBOUNDED,
    softcap: float = 0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache for arrays of any kind, float32 and float64 and any head_dim and page size.

    >>> o = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    q: (batch, seqlen_q, heads, head_dim); k_cache, v_cache: (batch, capacity, heads_kv, head_dim), or with block_table,
    int32 (batch, blocks of a sequence), (blocks, page, heads_kv, head_dim). k, v: (batch, new, heads_kv, head_dim),
    written to the caches in place behind cache_seqlens keys. cache_seqlens: int32 (batch,), or one number for all; None
    = the whole cache. cache_batch_idx: int32 (batch,). cache_leftpad: int32 (batch,), how many of a sequence's first
    keys are not seen. return_softmax_lse: return (o, lse), lse (batch, heads, seqlen_q). All others: as for
    flash_attn_func.

    What differs from flash-attn 2.8: a row without keys has lse -inf, and not +inf; num_splits changes nothing, because
    keys are divided in one fixed order; cache_seqlens of -1 is a row of padding. rotary_cos turns queries by their
    positions. flash-attn turns them all by cache_seqlens if neither causal nor a window is given, so that is refused
    for several queries, and so are other numbers of queries than of new keys, and cache_leftpad with rotary_cos.

    Raises what `numba_flash.attention_kvcache` raises, with the names of these arguments.
    """
    window = None if window_size is UNBOUNDED else window_sides(window_size)
    number("num_splits", num_splits)
    given: dict[str, Any] = {}
    if rotary_cos is not None or rotary_sin is not None:
        if k is None:
            raise TypeError(
                "rotary_cos and rotary_sin were given without k and v: flash-attn turns new keys and q alone"
            )
        if q.shape[1] != k.shape[1] or q.shape[1] > 1 and not causal and window in (None, (None, None)):
            raise NotImplementedError(
                f"rotary_cos with {q.shape[1]} queries and {k.shape[1]} new keys, causal={causal}: it is taken for as "
                "many queries as new keys, and for several with causal or a window; otherwise rotate q and k before"
            )
        if cache_leftpad is not None:
            raise NotImplementedError("rotary_cos with cache_leftpad: rotate q and k before")
        given.update(rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_interleaved=rotary_interleaved)
    if cache_leftpad is not None:
        if tuple(getattr(cache_leftpad, "shape", ())) != (q.shape[0],):
            raise ValueError(
                f"cache_leftpad must be an array (batch,) = ({q.shape[0]},), not {described(cache_leftpad)}"
            )
        given.update(mask_mod=_behind_leftpad, aux=(cache_leftpad,))
    try:
        return kvcache.attention_kvcache(
            q,
            k_cache,
            v_cache,
            seqlens_k=_lengths(cache_seqlens, q, k, k_cache, block_table),
            k_new=k,
            v_new=v,
            page_table=block_table,
            cache_batch_idx=cache_batch_idx,
            causal=causal,
            window=window,
            scale=None if softmax_scale is None else number("softmax_scale", softmax_scale),
            softcap=None if type(softcap) in (int, float) and softcap <= 0 else _softcap(softcap),
            alibi_slopes=alibi_slopes,
            layout="bshd",
            return_lse=return_softmax_lse,
            **given,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, OF_CACHES)  # noqa: B904 - the same error


OF_CACHES = NAMES | dict(
    return_lse="return_softmax_lse", seqlens_k="cache_seqlens", k_new="k", v_new="v", page_table="block_table"
)


def _behind_leftpad(b: Any, h: Any, q_pos: Any, k_pos: Any, leftpad: Any) -> Any:
    return k_pos >= leftpad[b]


def _lengths(cache_seqlens: Any, q: Any, k: Any, k_cache: Any, block_table: Any) -> Any:
    """cache_seqlens as an array of q's kind, in q's place."""
    if hasattr(cache_seqlens, "shape") and not isinstance(cache_seqlens, np.generic):
        return cache_seqlens
    if cache_seqlens is None:
        if k is not None:
            raise TypeError("cache_seqlens must be given with k and v: it says where they go")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if isinstance(cache_seqlens, bool) or not hasattr(cache_seqlens, "__index__"):
        raise TypeError(f"cache_seqlens must be an int32 array (batch,), a whole number or None, not {cache_seqlens!r}")
    length = operator.index(cache_seqlens)
    if not -1 <= length < 2**31:
        raise ValueError(f"cache_seqlens must lie in 0 to the keys that the cache has room for, or be -1, not {length}")
    import array_api_compat

    xp = array_api_compat.array_namespace(q)
    return xp.full((q.shape[0],), length, dtype=xp.int32, device=array_api_compat.device(q))


def _read(length: Any) -> Any:
    """A tensor of one element as its number; anything else as it is."""
    return operator.index(length) if getattr(length, "shape", None) == () and hasattr(length, "__index__") else length


def _check_packed(name: str, array: Any, wanted: str) -> None:
    shape, names = tuple(array.shape), wanted.strip("()").split(", ")
    if len(shape) != len(names) or any(n.isdigit() and int(n) != size for n, size in zip(names, shape, strict=True)):
        raise ValueError(f"{name} must have shape {wanted}, not {shape}")


def _dropout(dropout_p: float, q: Any) -> dict[str, Any]:
    """dropout_p, where it is not 0, with a seed, as `numba_flash.attention` takes them."""
    if not dropout_p:
        return {}
    if type(q).__module__.partition(".")[0] != "torch":
        raise NotImplementedError(
            f"dropout_p of {dropout_p} needs a seed, and this signature has none: for torch tensors it is drawn from "
            "torch's generator; for other arrays call numba_flash.attention with dropout_p= and seed="
        )
    from ..torch_settings import drawn_seed

    return dict(dropout_p=dropout_p, seed=drawn_seed())


def _softcap(softcap: Any) -> float | None:
    cap = number("softcap", softcap)
    if not isinstance(cap, (int, float)) or isinstance(cap, bool):
        raise TypeError(f"softcap must be a number, with 0.0 for none, not {softcap!r}")
    return None if cap <= 0 else cap  # NaN is attention's to refuse
