"""context_parallel_attention_kvcache(): a step of generation whose cache is divided among ranks."""

import functools
from typing import Any

from ..api.kvcache import attention_kvcache
from ..api.merge import merge
from ..dispatch.forward import AttentionOutput
from ..dispatch.kvcache import CacheCall
from ..dispatch.kvcache_nodes import joined, nodes
from ..problem.keywords import unexpected
from ..problem.kvcache import Cache
from ..problem.options import NUMBERS, Options
from .groups import empty, namespace
from .whole import agree, group_of

CHUNK = 256  # keys per leaf of the merge tree

# Arguments of attention_kvcache that are not taken, and what to use in their place.
INSTEAD = dict(
    k_new="a copy to the cache of the rank that has their positions, before the call",
    v_new="a copy to the cache of the rank that has their positions, before the call",
    slots="a copy to the cache of the rank that has their positions, before the call",
    rotary_cos="q and keys that are rotated already",
    rotary_sin="q and keys that are rotated already",
    prefix_of="attention_kvcache on one rank",
    prefix_lens="attention_kvcache on one rank",
    cu_seqlens_q="q of 4 dimensions",
    max_seqlen_q="q of 4 dimensions",
    bias="alibi_slopes",
    mask="window and causal",
    score_mod="attention_kvcache on one rank",
    mask_mod="attention_kvcache on one rank",
    dropout_p="no dropout",
    out="the result",
    stream="the current stream",
)


def context_parallel_attention_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    group: Any,
    *,
    seqlens_k: Any,
    share: int | None = None,
    page_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    cache_batch_idx: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    kernel: str = "auto",
    **refused: Any,
) -> Any:
    """`attention_kvcache` over caches of which each rank has a part: rank r has the keys [r * share, (r + 1) * share).

    >>> o = context_parallel_attention_kvcache(q, k_cache, v_cache, group, seqlens_k=lengths, causal=True)

    All ranks of `group` call it with equal q, lengths and options, and all get the whole result. Each computes q over
    its own keys; one exchange of head_dim_v + 2 numbers for each row joins what they have found.

    group: a process group or a DeviceMesh of torch, a communicator of nccl4py, or a Group.
    k_cache, v_cache, page_table, page_indptr, page_indices, cache_batch_idx: the rank's own keys, as for
        `attention_kvcache`. New keys are copied to the cache of the rank that has their positions, before the call.
    seqlens_k: int32 (batch,), how many keys all ranks have of each sequence, new ones included; -1: a row of padding.
    share: how many positions a rank has, 256 times a power of two; None = the rows that its cache has for a sequence.
    causal, window, q_offset, scale, softcap, alibi_slopes, sinks, layout, return_lse, kernel: as for
        `attention_kvcache`, by positions in the whole.

    With kernel="cpu", and up to 64 rows for a KV head, the result has the bits of one process that has all keys: a
    rank's keys are a node of the tree that decides about them (docs/serving.md). Other kernels round each rank's o to
    q's dtype before `merge` joins them. Equal calls give equal bits, and all ranks have the same ones.

    Raises what `attention_kvcache` raises; NotImplementedError for options that ranks cannot serve; RuntimeError if
    another rank has ended, or does not answer within the group's own timeout.
    """
    _refuse(refused)
    made = group_of(group)
    caches = dict(page_table=page_table, page_indptr=page_indptr, page_indices=page_indices)
    caches |= dict(cache_batch_idx=cache_batch_idx)
    of_score = dict(scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
    tokens = 2 if layout == "bhsd" else 1
    share = _share(share, k_cache, tokens, page_table, page_indices)
    facts = dict(q=tuple(q.shape), dtype=str(q.dtype), width=v_cache.shape[-1], share=share, causal=causal)
    agree(group, made, q, facts | dict(window=window, kernel=kernel))
    first, xp = made.rank * share, namespace(seqlens_k)
    whole = xp.clip(seqlens_k, 0)
    offset = whole - q.shape[tokens] if q_offset is None else xp.zeros_like(whole) + q_offset
    own = xp.astype(xp.clip(whole - first, 0, share), xp.int32)
    options = functools.partial(
        Options.of, causal, window, xp.astype(offset - first, xp.int32), layout, (), None, **of_score
    )
    call = CacheCall((q, k_cache, v_cache, None), Cache(own, **caches), options(sinks=None), True, None, kernel)
    found = nodes(call)
    if found is not None:
        o, lse = joined(call._replace(options=options()), _gathered(made, found))
    else:
        o, lse = _merged(made, call, sinks, layout)
    return AttentionOutput(o, lse) if return_lse else o


def _merged(group: Any, call: CacheCall, sinks: Any, layout: str) -> Any:
    """Merges each rank's o and lse in their dtype, for kernels without nodes."""
    (q, k, v, _), options = call.operands, call.options
    named = {x: options.array(x) for x in ("alibi_slopes", "q_offset")} | dict(causal=options.causal)
    named |= dict(zip(NUMBERS, options.numbers, strict=True)) | dict(window=options.window, layout=layout)
    named |= {name: x for name, x in call.cache._asdict().items() if x is not None}
    named["dropout_p"] = 0.0
    o, lse = attention_kvcache(q, k, v, return_lse=True, kernel=call.kernel, **named)
    xp = namespace(o)
    of_rows = xp.permute_dims(o, (0, 2, 1, 3)) if layout == "bshd" else o
    both = _gathered(group, xp.concat([xp.astype(of_rows, lse.dtype), lse[..., None]], axis=-1))
    parts = [x for part in both for x in (part[..., :-1], part[..., -1])]
    if sinks is not None:
        of_sinks = empty(lse, tuple(lse.shape))
        of_sinks[...] = sinks[..., None]
        parts += [xp.zeros_like(parts[0]), of_sinks]
    found, lse = merge(*parts)
    found = xp.astype(found, o.dtype)
    return xp.permute_dims(found, (0, 2, 1, 3)) if layout == "bshd" else found, lse


def _gathered(group: Any, x: Any) -> Any:
    """(ranks, *shape of x)"""
    return namespace(x).concat(group.all_gather(x[None], (1,) * group.size), axis=0)


def _share(share: int | None, k_cache: Any, tokens: int, page_table: Any, page_indices: Any) -> int:
    """The checked share: 256 times a power of two, so that a rank's keys are a node of the tree."""
    if share is None:
        if page_indices is not None:
            raise ValueError("share must say how many positions a rank has, with page_indices")
        share = k_cache.shape[tokens] * (1 if page_table is None else page_table.shape[1])
    leaves, rest = divmod(share, CHUNK)
    if rest or not leaves or leaves & (leaves - 1):
        raise ValueError(f"share must be {CHUNK} times a power of two, positions of each rank's cache, not {share}")
    return share


def _refuse(others: dict[str, Any]) -> None:
    for name, x in others.items():
        if name not in INSTEAD:
            raise unexpected("context_parallel_attention_kvcache", name)
        if x is not None:
            raise NotImplementedError(f"{name} is not taken where a cache is divided among ranks: use {INSTEAD[name]}")
