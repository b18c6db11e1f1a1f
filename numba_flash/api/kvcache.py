"""attention_kvcache(): signature and contract. The implementation is in dispatch/kvcache.py."""

from typing import Any, NoReturn

from .. import arrays
from ..dispatch import kvcache as dispatch
from ..dispatch.call import NO_AUX
from ..problem.kvcache import Cache
from ..problem.options import OPTION_NAMES, Options
from .forward import NO_DROPOUT, bound, refuse, refusing


@refusing
def attention_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    seqlens_k: Any,
    k_new: Any = None,
    v_new: Any = None,
    page_table: Any = None,
    page_indptr: Any = None,
    page_indices: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_interleaved: bool | None = None,
    cache_batch_idx: Any = None,
    slots: Any = None,
    prefix_of: Any = None,
    prefix_lens: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = NO_AUX,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
    **unknown: NoReturn,
) -> Any:
    """`attention` over a cache of keys and values, to which it first appends new ones: a step of generation.

    >>> o = numba_flash.attention_kvcache(q, k_cache, v_cache, seqlens_k=lengths, k_new=k, v_new=v, causal=True)

    q: (batch, heads, seqlen_q, head_dim), or with cu_seqlens_q (total_q, heads, head_dim). seqlen_q is 1 in a step of
        generation and more in a chunk of a prompt.
    k_cache, v_cache: contiguous (batch, heads_kv, capacity, head_dim), or pages (pages, heads_kv, page, head_dim), of
        any page size from 1 on and any strides; v_cache's head_dim may differ, and it may be a view of k_cache. With
        layout="bshd" heads and the dimension behind them change places, in q, k_new and out, too. vLLM's rows of K and
        V, FlashInfer's NHD and HND and Transformers' alternating pages are views of these shapes.
    seqlens_k: int32 (batch,), how many keys are valid before the new ones. Attention is over seqlens_k and the new
        ones. -1 is a row of padding: nothing is appended, and no key is seen.
    k_new, v_new: (batch, heads_kv, new, head_dim), or with cu_seqlens_q (total_q, heads_kv, head_dim), a new key for
        each query. They are written to the caches in place, behind the valid keys. Without a v_new v_cache must be a
        view of k_cache.
    page_table: int32 (batch, pages of a sequence): key j is row j % page of page page_table[b, j // page].
    page_indptr, page_indices: the same as CSR, int32 (batch + 1,) and (pages of all sequences,): the pages of sequence
        b begin at page_indices[page_indptr[b]].
        Numbers of pages that are not asked for, behind the keys or before a window, may be anything, such as -1.
    rotary_cos, rotary_sin: (positions, rotary_dim // 2), float32 or q's dtype: q and k_new are rotated by their
        positions among the keys. Sums are in float32 (float64 for float64). The result is rounded to q's dtype.
    rotary_interleaved: whether columns 0 and 1 are a pair (True, GPT-J), or columns 0 and rotary_dim // 2 (False,
        GPT-NeoX and Llama). It has no default, because those of other libraries differ.
    cache_batch_idx: int32 (batch,), which batch entry of a contiguous cache each sequence has; None = its own.
    slots: int32 or int64 (batch, new), or (total_q,): where new keys are written, page * page size + row, instead of by
        the table; negative ones are not written. Positions stay those behind the valid keys.
    prefix_of, prefix_lens: int32 (batch,): the first prefix_lens[b] keys of sequence b are those of sequence
        prefix_of[b], in the same pages. prefix_of[b] is the first of the sequences that share this prefix, side by
        side; b itself or -1: none. They change no result and no bit: a kernel reads a prefix once for many sequences
        (docs/serving.md).
    cu_seqlens_q: int32 (batch + 1,), where each sequence's queries begin and end in q: sequences with different numbers
        of queries, such as prompts beside steps of generation. Rows of no sequence give o = 0 and lse = -inf.
    max_seqlen_q: an upper bound of the lengths in cu_seqlens_q; None = total_q.
    q_offset: as for `attention`; None: the last query has the position of the last key, new ones included.
    causal, window, scale, softcap, alibi_slopes, bias, mask, score_mod, mask_mod, aux, sinks, dropout_p, seed,
    return_lse, out, stream, kernel: as for `attention`. bias and mask need q of 4 dimensions; they are broadcast to
        (batch, heads, seqlen_q, capacity), where the capacity of a table is its pages times the page size.

    In host memory lengths, slots and the pages that are asked for are checked. On a device they are clamped, and what
    has no place is not written. It has no gradients: it is for generation, and torch tensors that require grad raise.

    A row's bits do not depend on its neighbours: a sequence has the same ones alone, in any batch and any order, beside
    sequences of any length, in any pages and, with up to 64 rows for a KV head, without pages. On "cpu" and on tensor
    cores the result of so many rows is a binary tree over chunks of 256 keys at absolute positions (docs/serving.md).

    Raises what `attention` raises, before anything is written. Only a read of score_mod or mask_mod outside an array of
    aux, which is found while computing, raises IndexError when new keys are there already; the same call writes them
    again to the same rows.
    """
    if unknown:
        refuse(attention_kvcache, unknown)
    cache = Cache(
        seqlens_k, k_new, v_new, page_table, page_indptr, page_indices, rotary_cos, rotary_sin, cache_batch_idx, slots,
        prefix_of, prefix_lens, cu_seqlens_q, rotary_interleaved, max_seqlen_q,
    )  # fmt: skip
    options = Options.of(
        causal, window, q_offset, layout, aux, seed, scale=scale, softcap=softcap, dropout_p=dropout_p, bias=bias,
        mask=mask, alibi_slopes=alibi_slopes, score_mod=score_mod, mask_mod=mask_mod, sinks=sinks,
    )  # fmt: skip
    call = dispatch.CacheCall((q, k_cache, v_cache, out), cache, options, return_lse, stream, kernel)
    try:
        return dispatch.run(call)
    except arrays.NeedsBridge as recorded:
        raise NotImplementedError(
            f"attention_kvcache has no gradients and is not traced: {recorded}; or use attention with seqlens_k="
        ) from None


def plan_of(arguments: dict[str, Any]) -> dispatch.CachePlan:
    """The plan of a call of attention_kvcache. arguments: by name."""
    given = bound(attention_kvcache, arguments)
    cache = Cache(*[given.pop(name) for name in Cache._fields])
    operands = tuple([given.pop(name) for name in ("q", "k_cache", "v_cache", "out")])
    options = Options.of(**{name: given.pop(name) for name in OPTION_NAMES if name in given})
    return dispatch.prepare(dispatch.CacheCall(operands, cache, options, **given))[-1]
