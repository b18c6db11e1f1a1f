"""attention_backward(): signature and contract. The implementation is in dispatch/."""

from typing import Any, NoReturn

from ..dispatch import backward as dispatch
from ..dispatch.backward import CallPlan
from ..dispatch.block_mask import expanded
from ..dispatch.call import NO_AUX, Call, folded, has_other_dimensions
from ..problem.options import NO_NUMBERS, AttentionGradients
from .forward import NO_DROPOUT, bound_to, refuse, refusing


@refusing
def attention_backward(
    do: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any,
    *,
    dlse: Any = None,
    wanted: tuple[str, ...] = ("dq", "dk", "dv"),
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    seqlens_k: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = NO_AUX,
    block_mask: Any = None,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    layout: str = "bhsd",
    stream: Any = None,
    kernel: str = "auto",
    **unknown: NoReturn,
) -> AttentionGradients:
    """The gradients of `attention` in memory proportional to the inputs: scores are not stored but recomputed.

    >>> o, lse = numba_flash.attention(q, k, v, causal=True, return_lse=True)
    >>> dq, dk, dv, *_ = numba_flash.attention_backward(do, q, k, v, o, lse, causal=True)

    With P = e^(S - lse), where S are the scores that `attention` describes, and delta = rowsum(do * o) - dlse:

        dv = P^T do     dP = do v^T     dS = P * (dP - delta)     dq = scale * dS k     dk = scale * dS^T q

    dS is also the gradient of bias. The gradient of a sink is the sum of -e^(sink - lse) * delta over its rows.
    With softcap, dS for dq and dk is multiplied by 1 - tanh(x / cap)^2. With dropout_p and the forward's seed, dP and
    the P in dv are 0 for dropped weights, and are multiplied by 1 / (1 - dropout_p) elsewhere.

    do: the gradient of o, in o's shape and dtype. q, k, v and all options: the arguments of the call of `attention`,
    of as many dimensions as there.
    o, lse: its results with return_lse=True. If k and v are a part of a longer set of keys, over which o and lse were
    computed, as in context-parallel attention, then dk and dv are final, dsinks is that of the whole in each part, and
    dq must be summed over the parts. lse must be contiguous; all other arrays may have any strides.
    dlse: the gradient of lse, (batch, heads, seqlen_q) in lse's dtype; None = lse was not used.
    wanted: which gradients to compute, as names of AttentionGradients' fields; other gradients cost nothing. "daux[0]"
        is the gradient through score_mod of aux[0], an array of real numbers.
    stream: as for `attention`.
    kernel: "auto", or by name "reference", "v2", "mma", "wgmma", "cpu". Kernels without a backward raise an error that
        says what would run. `explain_backward` says which kernels run, and why.

    Returns AttentionGradients(dq, dk, dv, dbias, dalibi_slopes, dsinks, daux) in the caller's kind of array: dq, dk,
    dv like q, k, v, with dk and dv summed over the query heads that share a KV head; dbias in bias' own shape
    and dtype, summed over the dimensions in which it is broadcast, as are dalibi_slopes and dsinks; daux a tuple as
    long as aux, with None for what was not wanted. Sums are in float32, for float64 in float64, and are rounded once.

    A query that sees no key (lse -inf) has gradient 0 and adds 0 to other gradients, as does a key that no query sees.
    The contents of positions that seqlens_k, window, causal or mask remove never reach a gradient, not even NaN and
    Inf.

    Raises TypeError, ValueError, NotImplementedError and IndexError as `attention` does.

    Sources: Dao et al., FlashAttention (2022), and Dao, FlashAttention-2 (2023).
    """
    if unknown:
        refuse(attention_backward, unknown)
    if block_mask is not None:
        causal, window, q_offset, seqlens_k, mask_mod, aux = expanded(
            block_mask, causal, window, q_offset, seqlens_k, mask_mod, aux
        )
    numbers = NO_NUMBERS if scale is softcap is None and dropout_p is NO_DROPOUT else (scale, softcap, dropout_p)
    plain = bias is mask is alibi_slopes is seqlens_k is sinks is None
    given = None if plain else (bias, mask, alibi_slopes, seqlens_k, sinks, None, None)
    functions = None if score_mod is mask_mod is None and aux is NO_AUX else (score_mod, mask_mod, aux)
    options = causal, window, q_offset, numbers, given, functions, layout, seed
    return dispatch.run(((q, k, v, o, lse, do, dlse), options, True, wanted, stream, kernel))


def prepare_call(arguments: dict[str, Any]) -> tuple[list[Any], CallPlan]:
    """`dispatch.backward.prepare` for the arguments of `attention_backward`, by name."""
    named = bound_to(attention_backward, arguments)
    operands = tuple([named.pop(name) for name in ("q", "k", "v", "o", "lse", "do", "dlse")])
    call = Call(operands, **named)
    if has_other_dimensions(call.operands[0], call.options.layout):
        call, _ = folded(call)
    return dispatch.prepare(call)
