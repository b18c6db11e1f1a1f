"""The signature of torch's own attention."""

from torch import Tensor

from .. import api
from ..bridges.torch import autocast


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with gradients also of attn_mask.

    >>> o = scaled_dot_product_attention(query, key, value, is_causal=True)

    query: (batch, heads, seqlen_q, head_dim); key and value with seqlen_k, and with fewer heads if enable_gqa.
    attn_mask: bool, True = attend, or added to the scores, in float32 or query's dtype; broadcastable to (batch,
    heads, seqlen_q, seqlen_k), and not together with is_causal. Query 0 stands at key 0 ("top-left"). Under
    torch.autocast float32 tensors are cast, as they are there. A query that sees no key gives 0.

    Raises NotImplementedError for dropout_p other than 0 and for other than 4 dimensions, and whatever
    `numba_flash.attention` raises.
    """
    if dropout_p != 0.0:
        raise NotImplementedError(f"dropout_p must be 0.0, dropout is not implemented yet, not {dropout_p!r}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise NotImplementedError(f"{name} must have 4 dimensions, not shape {tuple(tensor.shape)}")
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask must be None when is_causal=True")
    if not enable_gqa and not query.shape[1] == key.shape[1] == value.shape[1]:
        heads = f"{query.shape[1]}, {key.shape[1]} and {value.shape[1]}"
        raise ValueError(f"enable_gqa must be True where query, key and value have {heads} heads")
    additive = attn_mask is not None and attn_mask.is_floating_point()
    return api.attention(
        autocast(query), autocast(key), autocast(value), causal=is_causal, q_offset=0, scale=scale,
        bias=attn_mask if additive else None, mask=None if additive else attn_mask,
    )  # fmt: skip
