"""attention_varlen() and attention_varlen_backward(): signatures and contracts. The implementation is in dispatch/."""

from typing import Any, NoReturn

from .. import arrays
from ..dispatch import backward as gradients, forward as dispatch
from ..dispatch.call import NO_AUX, Call
from ..problem.options import AttentionGradients, Options
from ..problem.packed import bounds
from .forward import NO_DROPOUT, bound, bridge, refuse, refusing


@refusing
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
    **unknown: NoReturn,
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
    mask_mod with aux.

    Raises what `attention` raises.
    """
    if unknown:
        refuse(attention_varlen, unknown)
    spans = cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k
    score = scale, softcap, dropout_p, alibi_slopes, sinks, score_mod, mask_mod, aux
    call = Call((q, k, v, out), _options(spans, causal, window, q_offset, score, seed), return_lse)
    call = call._replace(stream=stream, kernel=kernel)
    try:
        return dispatch.run(call)
    except arrays.NeedsBridge as recorded:
        family = recorded.family
    return bridge(family).run(call)


def _in_torch_compile(*operands: Any, **options: Any) -> Any:
    from ..bridges.torch import attention_varlen as traced

    return traced(*operands, **options)


attention_varlen._torchdynamo_inline = _in_torch_compile  # type: ignore[attr-defined]


@refusing
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
    stream: Any = None,
    kernel: str = "auto",
    **unknown: NoReturn,
) -> AttentionGradients:
    """The gradients of `attention_varlen`, as `attention_backward` gives those of `attention`.

    >>> o, lse = numba_flash.attention_varlen(q, k, v, cu_seqlens, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = numba_flash.attention_varlen_backward(do, q, k, v, o, lse, cu_seqlens, causal=True)

    do: the gradient of o, in o's shape and dtype. o, lse: the results of `attention_varlen` with return_lse=True.
    dlse: the gradient of lse, (heads, total_q) in lse's dtype. wanted: as for `attention_backward`; dsinks and
    dalibi_slopes are summed over the sequences, if sinks and slopes are (heads,), and daux always.
    All others: the arguments of the call of `attention_varlen`.

    Gradients of rows of no sequence, and of keys that are not valid, are 0.
    """
    if unknown:
        refuse(attention_varlen_backward, unknown)
    spans = cu_seqlens_q, cu_seqlens_k, seqlens_k, max_seqlen_q, max_seqlen_k
    score = scale, softcap, dropout_p, alibi_slopes, sinks, score_mod, mask_mod, aux
    options = _options(spans, causal, window, q_offset, score, seed)
    return gradients.run(((q, k, v, o, lse, do, dlse), options, True, wanted, stream, kernel))


SPANS = ("cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "max_seqlen_q", "max_seqlen_k")
SCORE = ("scale", "softcap", "dropout_p", "alibi_slopes", "sinks", "score_mod", "mask_mod", "aux")


def _options(spans: Any, causal: Any, window: Any, q_offset: Any, score: Any, seed: Any) -> Options:
    """The Options of a call. spans, score: the values of SPANS and SCORE."""
    of_q, of_k, seqlens_k, most_q, most_k = spans
    if of_q is None:
        raise TypeError("cu_seqlens_q must be an int32 array (batch + 1,), not None")
    ends = dict(cu_seqlens_q=of_q, cu_seqlens_k=of_q if of_k is None else of_k, seqlens_k=seqlens_k)
    named = dict(zip(SCORE, score, strict=True)) | ends
    return Options.of(causal, window, q_offset, layout=bounds(most_q, most_k), seed=seed, **named)


def call_of(function: Any, arguments: dict[str, Any]) -> Call:
    """The Call that attention_varlen or attention_varlen_backward makes of these arguments, by name."""
    given = bound(function, arguments)
    spans, score = ([given.pop(name) for name in names] for names in (SPANS, SCORE))
    causal, window, q_offset, seed = (given.pop(name) for name in ("causal", "window", "q_offset", "seed"))
    options = _options(spans, causal, window, q_offset, score, seed)
    names = ("q", "k", "v", "out") if function is attention_varlen else ("q", "k", "v", "o", "lse", "do", "dlse")
    return Call(tuple([given.pop(name) for name in names]), options, **given)
