"""attention_varlen() and attention_varlen_backward(): signatures and contracts. What they do is in dispatch/."""

from typing import Any

from .. import arrays
from ..dispatch import backward as gradients
from ..dispatch import forward as dispatch
from ..dispatch.call import NO_AUX, Call
from ..problem.options import AttentionGradients, Options
from ..problem.packed import bounds
from .forward import NO_DROPOUT, bridge


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = NO_AUX,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
) -> Any:
    """`attention` over packed sequences: they follow each other in one array, without padding.

    >>> o = numba_flash.attention_varlen(q, k, v, cu_seqlens, causal=True)

    q: (total_q, heads, head_dim); k: (total_k, heads_kv, head_dim); v: (total_k, heads_kv, head_dim_v). The result is
    (total_q, heads, head_dim_v). A query sees keys of its own sequence alone.

    cu_seqlens_q: int32 (batch + 1,), on the arrays' device: sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
        of q. It need not begin with 0, nor end with total_q. Rows of no sequence are written, too: o = 0, lse = -inf,
        and gradients of 0. In host memory the values are checked. On a device they are clamped, so that nothing outside
        the arrays is read or written, because reading them would make the host wait.
    cu_seqlens_k: the same of k and v; None = cu_seqlens_q.
    seqlens_k: int32 (batch,), how many of a sequence's keys are valid, from its first one on; None = all.
    max_seqlen_q, max_seqlen_k: upper bounds of the lengths; None = total_q and total_k. With a tight bound fewer blocks
        start that have nothing to do. Rows of a sequence behind its bound count as rows of no sequence.
    causal, window, q_offset: as for `attention`, by positions inside the sequence. q_offset=None: the last query of a
        sequence has the position of its last valid key.
    alibi_slopes, sinks: (heads,) or (batch, heads), where batch is the number of sequences.
    score_mod, mask_mod, aux: as for `attention`. b is the number of the sequence, and positions are inside it.
    dropout_p, seed: as for `attention`, with that b and those positions.
    return_lse: return AttentionOutput(o, lse), lse (heads, total_q).
    All others: as for `attention`.

    A sequence's result has the same bits alone, in any batch and in any order, if b is not asked for.

    bias and mask are not taken, because there is no matrix of scores that they could be broadcast to: use score_mod and
    mask_mod with aux. There are no kernels for this in "wgmma" yet; on a GPU "auto" takes "mma" or "v2".

    Raises what `attention` raises.
    """
    numbers = dict(scale=scale, softcap=softcap, dropout_p=dropout_p)
    functions = dict(score_mod=score_mod, mask_mod=mask_mod, aux=aux)
    spans = _spans(cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k)
    given = dict(alibi_slopes=alibi_slopes, sinks=sinks) | numbers | functions | spans
    options = Options.of(causal, window, q_offset, seed=seed, **given)
    call = Call((q, k, v, out), options, return_lse, stream=stream, kernel=kernel)
    try:
        return dispatch.run(call)
    except arrays.NeedsBridge as recorded:
        family = recorded.family
    return bridge(family).run(call)


def attention_varlen_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    dlse: Any = None,
    wanted: tuple[str, ...] = ("dq", "dk", "dv"),
    seqlens_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = NO_AUX,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    deterministic: bool = True,
    stream: Any = None,
    kernel: str = "auto",
) -> AttentionGradients:
    """The gradients of `attention_varlen`, as `attention_backward` gives those of `attention`.

    >>> o, lse = numba_flash.attention_varlen(q, k, v, cu_seqlens, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = numba_flash.attention_varlen_backward(do, q, k, v, o, lse, cu_seqlens, causal=True)

    do: the gradient of o, in o's shape and dtype. o, lse: the results of `attention_varlen` with return_lse=True.
    dlse: the gradient of lse, (heads, total_q) in lse's dtype. wanted: as for `attention_backward`; dsinks is summed
    over the sequences, if sinks are (heads,). All others: the arguments of the call of `attention_varlen`.

    Gradients of rows of no sequence, and of keys that are not valid, are 0.
    """
    numbers = dict(scale=scale, softcap=softcap, dropout_p=dropout_p)
    functions = dict(score_mod=score_mod, mask_mod=mask_mod, aux=aux)
    spans = _spans(cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k)
    given = dict(alibi_slopes=alibi_slopes, sinks=sinks) | numbers | functions | spans
    options = Options.of(causal, window, q_offset, seed=seed, **given)
    return gradients.run(((q, k, v, o, lse, do, dlse), options, True, wanted, deterministic, stream, kernel))


def _spans(cu_seqlens_q: Any, cu_seqlens_k: Any, seqlens_k: Any, most_q: Any, most_k: Any) -> dict[str, Any]:
    """The options that say where sequences are."""
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q must be an int32 array (batch + 1,), not None")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    return dict(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqlens_k=seqlens_k, layout=bounds(most_q, most_k)
    )
