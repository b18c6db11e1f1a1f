"""The signature of cuEquivariance's triangle attention."""

import sys
from typing import Any

from ..api import forward as api
from ..api.weights import row_statistics
from .arguments import described, number, renamed

NAMES = dict(seqlens_k="kv_lengths")


def triangle_attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any,
    mask: Any = None,
    scale: float | None = None,
    return_aux: bool = False,
    *,
    kv_lengths: Any = None,
) -> Any:
    """cuequivariance_torch.triangle_attention, on CPUs and every GPU, in every dtype and for any head_dim.

    >>> o = triangle_attention(q, k, v, bias, mask)

    q: (batch, tokens, heads, seqlen_q, head_dim); k: (batch, tokens, heads, seqlen_k, head_dim); v: likewise with
    head_dim_v. bias: (batch, 1, heads, seqlen_q, seqlen_k), added to the scores, in float32 or q's dtype; all tokens
    share it, and it is read where it lies. mask: bool (batch, tokens, 1, 1, seqlen_k), True = attend. All of them may
    come without batch. kv_lengths: int32 (batch, tokens, 1, 1, 1), how many keys are valid. scale: None = head_dim **
    -0.5. torch tensors and JAX arrays get gradients, also that of bias, which is summed over the tokens.

    A batch of one is one call. In a larger batch each entry is a call of its own, because no strides can express a bias
    that differs between entries and that all tokens share. The results are then stacked, which copies them.

    Differences from cuEquivariance: a query without a valid key gives 0, not the mean of v; nothing is cast; mask must
    be bool; the leading dimensions of one call must merge by views, as in contiguous arrays.

    return_aux: return (o, lse, largest), lse and the largest score of each query (batch, tokens, heads, seqlen_q, 1),
    in float32 (float64 for float64). A second pass computes largest. It has no gradient, and JAX cannot trace it.

    Raises what `numba_flash.attention` raises.
    """
    named = dict(q=q, k=k, v=v, bias=bias, mask=mask, kv_lengths=kv_lengths)
    given = {name: x for name, x in named.items() if x is not None or name in "qkv"}
    dimensions = len(getattr(q, "shape", ()))
    for name, x in given.items():
        shape = tuple(getattr(x, "shape", ()))
        if dimensions not in (4, 5) or len(shape) != dimensions:
            raise ValueError(
                f"{name} must have 5 dimensions, as in (batch, tokens, heads, seqlen, head_dim), or all of them 4, "
                f"without batch, not {described(x)} beside q of shape {tuple(getattr(q, 'shape', ()))}"
            )
        if dimensions == 5 and shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have q's batch of {q.shape[0]}, not shape {shape}")
    scale = None if scale is None else number("scale", scale)
    try:
        if dimensions == 4 or q.shape[0] < 2:
            return _attend(scale, return_aux, **given)
        entries = [_attend(scale, return_aux, **{name: x[at] for name, x in given.items()}) for at in range(len(q))]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error
    return tuple(map(_stacked, zip(*entries, strict=True))) if return_aux else _stacked(entries)


def _attend(scale: Any, return_aux: bool, *, kv_lengths: Any = None, **given: Any) -> Any:
    options = dict(scale=scale, seqlens_k=None if kv_lengths is None else kv_lengths[..., 0, 0, 0])
    if not return_aux:
        return api.attention(**given, **options)
    o, lse = api.attention(**given, **options, return_lse=True)
    q, k, _, *others = (x.detach() if hasattr(x, "detach") else x for x in (*given.values(), lse))
    options |= dict(zip([name for name in given if name not in ("q", "k", "v")], others, strict=False))
    largest = row_statistics(q, k, others[-1], **options).max_logit
    return o, lse[..., None], largest[..., None]


def _stacked(entries: Any) -> Any:
    entries = list(entries)
    first = entries[0]
    if "torch" in sys.modules and isinstance(first, sys.modules["torch"].Tensor):
        return sys.modules["torch"].stack(entries)
    if "jax" in sys.modules and isinstance(first, sys.modules["jax"].Array):
        return sys.modules["jax"].numpy.stack(entries)
    return sys.modules[type(first).__module__.partition(".")[0]].stack(entries)
