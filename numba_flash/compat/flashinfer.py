"""FlashInfer's decode and prefill over pages, as plain functions of the arrays that its wrappers take.

There is no plan and no workspace: a call reads its arrays on the device. The pages of sequence b are
kv_indices[kv_indptr[b]] to kv_indices[kv_indptr[b + 1] - 1], and the last of them has kv_last_page_len[b] keys.
"""

import math
from typing import Any

import numpy as np

from .. import arrays
from ..api import kvcache
from .arguments import described, number, renamed

NAMES = dict(
    scale="sm_scale",
    softcap="logits_soft_cap",
    window="window_left",
    cu_seqlens_q="qo_indptr",
    page_indptr="kv_indptr",
    page_indices="kv_indices",
    seqlens_k="kv_last_page_len",
    layout="kv_layout",
)
LAYOUTS = dict(NHD="bshd", HND="bhsd")


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    *,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """flashinfer.single_decode_with_kv_cache for arrays of any kind.

    >>> o = single_decode_with_kv_cache(q, k, v)

    q: (heads, head_dim); k, v: (keys, heads_kv, head_dim), or with kv_layout="HND" (heads_kv, keys, head_dim). The
    result is (heads, head_dim). window_left: how many keys before the last one are seen; -1 = all. logits_soft_cap:
    None or 0 = none. return_lse: return (o, lse), lse (heads,) in base 2, as FlashInfer has it.

    pos_encoding_mode, use_tensor_cores and the scales of quantised caches are not taken.
    """
    _check_dimensions(2, q=q)
    _check_dimensions(3, k=k, v=v)
    layout, xp = _layout(kv_layout), _namespace(q)
    lengths = xp.full((1,), k.shape[0 if layout == "bshd" else 1], dtype=xp.int32, device=_device(q))
    single = q[None, None] if layout == "bshd" else q[None, :, None]
    options = _options(window_left, logits_soft_cap, sm_scale)
    found = _call(single, k[None], v[None], return_lse, seqlens_k=lengths, layout=layout, **options)
    o, lse = found if return_lse else (found, found)
    o = o[0, 0] if layout == "bshd" else o[0, :, 0]
    return (o, _base_2(lse[0, :, 0])) if return_lse else o


def batch_decode_with_paged_kv_cache(
    q: Any,
    paged_kv_cache: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of one query per sequence to a paged cache, like FlashInfer's BatchDecodeWithPagedKVCacheWrapper.

    >>> o = batch_decode_with_paged_kv_cache(q, cache, kv_indptr, kv_indices, kv_last_page_len)

    q: (batch, heads, head_dim); paged_kv_cache: (pages, 2, page, heads_kv, head_dim), or with kv_layout="HND" (pages,
    2, heads_kv, page, head_dim), or a pair (k, v) without the dimension of 2. kv_indptr: int32 (batch + 1,);
    kv_indices: int32; kv_last_page_len: int32 (batch,). A sequence may have no page here: it gives 0. All others: as
    for single_decode_with_kv_cache. The result is (batch, heads, head_dim), and lse (batch, heads) in base 2.
    """
    _check_dimensions(3, q=q)
    (k, v), layout = _caches(paged_kv_cache), _layout(kv_layout)
    rows = q[:, None] if layout == "bshd" else q[:, :, None]
    found = _call(
        rows,
        k,
        v,
        return_lse,
        **_pages(kv_indptr, kv_indices, kv_last_page_len, k, layout),
        sinks=sinks,
        **_options(window_left, logits_soft_cap, sm_scale),
    )
    o, lse = found if return_lse else (found, found)
    o = o[:, 0] if layout == "bshd" else o[:, :, 0]
    return (o, _base_2(lse[:, :, 0])) if return_lse else o


def batch_prefill_with_paged_kv_cache(
    q: Any,
    paged_kv_cache: Any,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    causal: bool = False,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
) -> Any:
    """Attention of packed queries to a paged cache, which holds their own keys already.

    >>> o = batch_prefill_with_paged_kv_cache(q, cache, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, causal=True)

    q: (total, heads, head_dim); qo_indptr: int32 (batch + 1,), where each sequence's queries begin and end. All others:
    as for batch_decode_with_paged_kv_cache. The result is (total, heads, head_dim), and lse (total, heads) in base 2.
    FlashInfer's BatchPrefillWithPagedKVCacheWrapper also takes custom_mask; for that `attention_kvcache` has mask_mod.
    """
    _check_dimensions(3, q=q)
    (k, v), layout = _caches(paged_kv_cache), _layout(kv_layout)
    found = _call(
        q,
        k,
        v,
        return_lse,
        cu_seqlens_q=qo_indptr,
        **_pages(kv_indptr, kv_indices, kv_last_page_len, k, layout),
        causal=causal,
        sinks=sinks,
        **_options(window_left, logits_soft_cap, sm_scale),
    )
    return (found[0], _base_2(found[1].T)) if return_lse else found


def _call(q: Any, k: Any, v: Any, return_lse: bool, **options: Any) -> Any:
    try:
        return kvcache.attention_kvcache(q, k, v, return_lse=return_lse, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error


def _namespace(x: Any) -> Any:
    import array_api_compat

    return array_api_compat.array_namespace(x)


def _device(x: Any) -> Any:
    import array_api_compat

    return array_api_compat.device(x)


def _base_2(lse: Any) -> Any:
    return lse * (1 / math.log(2))


def _layout(kv_layout: Any) -> str:
    if not isinstance(kv_layout, str) or kv_layout not in LAYOUTS:
        raise ValueError(f'kv_layout must be "NHD" or "HND", not {kv_layout!r}')
    return LAYOUTS[kv_layout]


def _caches(paged_kv_cache: Any) -> Any:
    pair = paged_kv_cache if isinstance(paged_kv_cache, tuple) else ()
    if [_dimensions(x) for x in pair] == [4, 4]:
        return pair
    if _dimensions(paged_kv_cache) != 5 or paged_kv_cache.shape[1] != 2:
        given = ", ".join(map(described, pair)) or described(paged_kv_cache)
        raise ValueError(f"paged_kv_cache must be (pages, 2, ...) of 5 dimensions, or a pair of 4, not {given}")
    return paged_kv_cache[:, 0], paged_kv_cache[:, 1]


def _dimensions(x: Any) -> int:
    return len(getattr(x, "shape", ()))


def _check_dimensions(wanted: int, **given: Any) -> None:
    for name, x in given.items():
        if _dimensions(x) != wanted:
            raise ValueError(f"{name} must be an array of {wanted} dimensions, not {described(x)}")


def _pages(kv_indptr: Any, kv_indices: Any, kv_last_page_len: Any, k: Any, layout: str) -> dict[str, Any]:
    """The pages and lengths as arguments of attention_kvcache."""
    named = dict(kv_indptr=kv_indptr, kv_last_page_len=kv_last_page_len)
    for name, x in named.items():
        if not hasattr(x, "shape") or len(x.shape) != 1:
            raise TypeError(f"{name} must be an int32 array of 1 dimension, not {described(x)}")
    if kv_last_page_len.shape[0] != kv_indptr.shape[0] - 1:  # a shape of (1,) would be broadcast
        shapes = tuple(kv_last_page_len.shape), tuple(kv_indptr.shape)
        raise ValueError(
            f"kv_last_page_len must have shape (batch,) and kv_indptr (batch + 1,), not {shapes[0]} and {shapes[1]}"
        )
    xp, page = _namespace(kv_indptr), k.shape[1 if layout == "bshd" else 2]
    count = kv_indptr[1:] - kv_indptr[:-1]
    on_host = [arrays.read(name, x) for name, x in named.items()]
    if all(x.layout.device is None for x in on_host):
        ends, last = map(arrays.host_view, on_host)
        if ((np.diff(ends) > 0) & ((last < 1) | (last > page))).any():
            raise ValueError(f"kv_last_page_len must lie in 1 to the keys of a page, {page}, not {last.tolist()}")
    lengths = xp.where(count > 0, (count - 1) * page + kv_last_page_len, xp.zeros_like(count))
    return dict(page_indptr=kv_indptr, page_indices=kv_indices, seqlens_k=lengths, layout=layout)


def _options(window_left: int, logits_soft_cap: Any, sm_scale: Any) -> dict[str, Any]:
    if not hasattr(window_left, "__index__"):
        raise TypeError(f"window_left must be a whole number, -1 for all keys, not {described(window_left)}")
    cap = None if logits_soft_cap is None else number("logits_soft_cap", logits_soft_cap)
    return dict(
        window=None if window_left < 0 else (window_left, None),
        softcap=cap if cap else None,
        scale=None if sm_scale is None else number("sm_scale", sm_scale),
    )
