"""The signatures of torch's own attention, and its registry of kernels."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..api import forward as api, varlen
from ..arrays import Layout
from ..bridges.torch import NO_DROPOUT
from ..bridges.torch_operations import recorded
from ..problem.forward import Problem, check_bool
from ..problem.options import Options
from .arguments import described, number, probability, refuse_nested, refuse_pages, renamed, window_sides
from .leading import attend_by_views, result_shape
from .torch_patched import Patched
from .torch_registry import register as register
from .torch_settings import autocast, drawn_seed

NAMES = dict(q="query", k="key", v="value", causal="is_causal", mask="attn_mask", bias="attn_mask")
VARLEN_NAMES = dict(
    q="query",
    k="key",
    v="value",
    cu_seqlens_q="cu_seq_q",
    cu_seqlens_k="cu_seq_k",
    max_seqlen_q="max_q",
    max_seqlen_k="max_k",
    seqlens_k="seqused_k",
    window="window_size",
)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with gradients also of attn_mask.

    >>> o = scaled_dot_product_attention(query, key, value, is_causal=True)

    query: (..., heads, seqlen_q, head_dim); key: (..., heads, seqlen_k, head_dim); value: (..., heads, seqlen_k,
    head_dim_v). Any number of leading dimensions, heads among them; they are broadcast to one another, as in torch.
    With enable_gqa=True key and value may have fewer heads, which divide query's.
    attn_mask: bool, True = attend, or added to the scores, in float32 or query's dtype; broadcastable to (..., heads,
    seqlen_q, seqlen_k), and not together with is_causal. Also a CausalBias of torch.nn.attention.bias.
    is_causal: query 0 stands at key 0 ("top-left").
    scale: a number, or a tensor of no dimensions, which is read; None = head_dim ** -0.5.
    Under torch.autocast tensors are cast as in torch, except a float32 attn_mask, which is more exact uncast.
    A query that sees no key gives 0. Tensors on the meta device give a result there.

    Returns (..., heads, seqlen_q, head_dim_v). The leading dimensions are seen as (batch, heads) by views, and nothing
    is copied. Where no view does, as for keys that repeat in the second of three dimensions, each index of the
    shortest dimension is an attention of its own, and the results are stacked, which is a copy of them.

    dropout_p: from 0 to 1, as in `numba_flash.attention`; 1 gives 0. The seed is drawn from torch's default generator
    in host memory, which torch.manual_seed sets and torch.utils.checkpoint restores.

    Raises NotImplementedError for nested tensors; TypeError and ValueError as
    `numba_flash.attention` does, with the names of these arguments.
    """
    if type(dropout_p) not in (int, float) or dropout_p:
        dropout_p = probability("dropout_p", dropout_p, may_be_one=True)
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        is_causal, enable_gqa = _bool("is_causal", is_causal), _bool("enable_gqa", enable_gqa)
    if isinstance(scale, Tensor) and not scale.ndim and not scale.requires_grad:
        scale = scale.item()  # waits for the GPU if the number is there, as torch's own function does
    if scale is not None:
        scale = number("scale", scale)
    _check_tensors(query, key, value)
    q_offset: int | None = 0
    if attn_mask is not None:
        attn_mask, is_causal, q_offset = _understood(attn_mask, is_causal, query, key)
    if not query.is_meta and torch.is_autocast_enabled(query.device.type):
        query, key, value = autocast(query), autocast(key), autocast(value)
        if attn_mask is not None and attn_mask.dtype is not torch.float32:
            attn_mask = autocast(attn_mask)
    attend = functools.partial(_attend, is_causal, q_offset, scale, dropout_p)
    try:
        dimensions = _plain_dimensions(query.shape, key.shape, value.shape, enable_gqa)
        if dimensions == 4:
            return attend(query, key, value, attn_mask)
        if dimensions == 3 and (attn_mask is None or attn_mask.ndim <= 3):
            return attend(query[None], key[None], value[None], attn_mask)[0]
        return attend_by_views(query, key, value, attn_mask, enable_gqa, attend)
    except (TypeError, ValueError, NotImplementedError) as error:
        _check_devices(query, key=key, value=value, attn_mask=attn_mask)
        result_shape(query, key, value, attn_mask, enable_gqa)  # raises with the given shapes; error may name others
        raise renamed(error, NAMES)  # noqa: B904 - the same error


def patched() -> Patched:
    """Replaces torch.nn.functional.scaled_dot_product_attention by ours, in the whole process.

    >>> with patched():
    ...     loss = model(batch)
    >>> patched()  # for good, or until .restore() of what it gives

    So nn.MultiheadAttention, nn.TransformerEncoder, and models that call it run here, in every dtype, on CPUs and GPUs,
    forward and backward, also under torch.compile. The fast path of nn.TransformerEncoder for inference, which has an
    attention of its own, is off as long.

    A module that has taken the function by name before, as in `from torch.nn.functional import
    scaled_dot_product_attention`, keeps torch's. nn.MultiheadAttention with need_weights=True, which is its default,
    computes the weights itself. What `scaled_dot_product_attention` here does not take, such as nested tensors, raises
    NotImplementedError; nothing goes back to torch's own.
    """
    return Patched(scaled_dot_product_attention)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """torch.nn.attention.varlen.varlen_attn, on CPUs and in float32 and float64 too.

    >>> o = varlen_attn(query, key, value, cu_seq, cu_seq, longest, longest, window_size=(-1, 0))

    query: (total_q, heads, head_dim); key: (total_k, heads_kv, head_dim); value: likewise with head_dim_v. With
    enable_gqa=True key and value may have fewer heads, which divide query's.
    cu_seq_q, cu_seq_k: int32 (batch + 1,). max_q, max_k: whole numbers, upper bounds of the lengths.
    window_size: (left, right), inclusive, -1 = unbounded; (-1, 0) is causal. The last query of a sequence has the
    position of its last valid key. seqused_k: int32 (batch,), how many keys of a sequence are valid.
    num_splits: None or 1. Both give the same bits, and a sequence's result does not depend on its batch.
    return_aux: an AuxRequest of torch's; with lse=True, (o, lse) is returned, lse (heads, total_q).

    Gradients work with seqused_k, for which torch has none, and also through lse, whose gradient torch ignores. Rows of
    no sequence give 0, and their gradients are 0. Autocast does not cast these tensors, and neither does torch's own.

    Raises NotImplementedError for block_table, for num_splits above 1 and for nested tensors; TypeError and ValueError
    as `numba_flash.attention_varlen` does, with the names of these arguments.
    """
    spans = cu_seq_q, cu_seq_k, max_q, max_k, seqused_k
    refuse_pages(block_table, num_splits)
    return _packed(query, key, value, spans, return_aux, scale, window_size, enable_gqa)


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """torch.nn.attention.varlen.varlen_attn_out: `varlen_attn` into `out`, which has no gradient."""
    spans = cu_seq_q, cu_seq_k, max_q, max_k, seqused_k
    refuse_pages(block_table, num_splits)
    return _packed(query, key, value, spans, return_aux, scale, window_size, enable_gqa, out)


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: tuple[Any, ...],
    return_aux: Any,
    scale: Any,
    window_size: Any,
    enable_gqa: Any,
    out: Any = None,
) -> Any:
    """`numba_flash.attention_varlen` with torch's additional checks."""
    of_q, of_k, most_q, most_k, used = spans
    if return_aux is not None and not hasattr(return_aux, "lse"):
        raise TypeError(f"return_aux must be None or an AuxRequest, not {described(return_aux)}")
    if of_k is None:
        raise TypeError("cu_seq_k must be an int32 tensor (batch + 1,), not None, which goes with a block_table")
    try:
        if not _bool("enable_gqa", enable_gqa) and query.shape[1:2] != key.shape[1:2]:
            shapes = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
            raise ValueError(f"{shapes}: where query heads share those of key, pass enable_gqa=True")
        return varlen.attention_varlen(
            query,
            key,
            value,
            of_q,
            of_k,
            seqlens_k=used,
            max_seqlen_q=most_q,
            max_seqlen_k=most_k,
            window=window_sides(window_size),
            scale=None if scale is None else number("scale", scale),
            return_lse=return_aux is not None and return_aux.lse,
            out=out,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        refuse_nested(
            "Pass its values(), and its offsets() in int32 as cu_seq_q or cu_seq_k", query=query, key=key, value=value
        )
        raise renamed(error, VARLEN_NAMES)  # noqa: B904 - the same error


def _bool(name: str, value: Any) -> bool:
    check_bool(name, value)
    return bool(value)  # torch's operations do not take NumPy's bool


def _check_tensors(query: Any, key: Any, value: Any) -> None:
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        wrong = [(name, x) for name, x in dict(query=query, key=key, value=value).items() if not isinstance(x, Tensor)]
        raise TypeError(f"{wrong[0][0]} must be a torch tensor, not {type(wrong[0][1]).__name__}")
    if query.is_nested or key.is_nested or value.is_nested:
        name, x = next((n, x) for n, x in dict(query=query, key=key, value=value).items() if x.is_nested)
        raise NotImplementedError(
            f"{name} is a nested tensor, {x.layout}: sequences of several lengths are not implemented yet. Pass "
            "torch.nested.to_padded_tensor(...) of each, and an attn_mask that is False for the padding"
        )


def _check_devices(query: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != query.device:
            raise ValueError(f"{name} must be on the device of query, {query.device}, not on {x.device}")


def _understood(attn_mask: Any, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool, int | None]:
    """-> attn_mask, is_causal and q_offset. A CausalBias of torch gives q_offset, the position of query 0."""
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch tensor or None, not {type(attn_mask).__name__}")
    if is_causal:
        raise ValueError("attn_mask must be None when is_causal=True; combine the two in attn_mask")
    if type(attn_mask) is not Tensor and type(attn_mask).__name__ == "CausalBias":
        from torch.nn.attention.bias import CausalBias, CausalVariant

        if isinstance(attn_mask, CausalBias):
            lengths = (attn_mask.seq_len_q, attn_mask.seq_len_kv)
            if lengths != (*query.shape[-2:-1], *key.shape[-2:-1]):
                shapes = f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}"
                raise ValueError(f"attn_mask is a CausalBias of (seqlen_q, seqlen_k) = {lengths}, but {shapes}")
            return None, True, 0 if attn_mask.variant == CausalVariant.UPPER_LEFT else None
    if attn_mask.is_nested:
        raise NotImplementedError("attn_mask is a nested tensor, which is not implemented; pass a padded one")
    if attn_mask.dtype is not torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask must be bool (True = attend) or floating point (added), not {attn_mask.dtype}")
    return attn_mask, False, 0


def _plain_dimensions(q: Any, k: Any, v: Any, enable_gqa: bool) -> int:
    """The number of dimensions if all shapes are ([batch,] heads, ...) without broadcasting, the usual case; else
    0."""
    if not 3 <= len(q) == len(k) == len(v) <= 4 or k[-3] != v[-3] or not (q[-3] == k[-3] or enable_gqa):
        return 0
    return len(q) if len(q) == 3 or q[0] == k[0] == v[0] else 0


def _attend(
    is_causal: bool,
    q_offset: int | None,
    scale: float | None,
    dropout_p: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """`numba_flash.attention` for tensors of 4 dimensions."""
    bias, mask = (None, attn_mask) if attn_mask is not None and attn_mask.dtype is torch.bool else (attn_mask, None)
    if dropout_p == 1:  # no weight is left, as where no key is seen
        mask = torch.zeros(1, dtype=torch.bool, device=query.device) if mask is None else mask & False
        dropout_p = 0
    if query.is_meta:
        return _on_meta(query, key, value, bias, mask, is_causal, q_offset, scale)
    attend = functools.partial(api.attention, causal=is_causal, q_offset=q_offset, scale=scale, bias=bias, mask=mask)
    if dropout_p:
        attend = functools.partial(attend, dropout_p=dropout_p, seed=drawn_seed())
    return attend(query, key, value)


def _on_meta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    q_offset: int | None,
    scale: float | None,
) -> Tensor:
    """Runs on meta tensors, which have no numbers: makes the same checks, then returns a result of the right shape."""
    _check_devices(query, key=key, value=value, attn_mask=mask if bias is None else bias)
    added, seen = (x if x is None else _layout(x) for x in (bias, mask))
    options = Options.of(bias=added, mask=seen, q_offset=q_offset, causal=is_causal, scale=scale)
    Problem.of(_layout(query), _layout(key), _layout(value), options)
    options = Options.of(bias=bias, mask=mask, q_offset=q_offset, causal=is_causal, scale=scale)
    return recorded(query, key, value, options, "auto")[0]


def _layout(x: Tensor) -> Layout:
    return Layout("torch", None, tuple(x.shape), x.stride(), x.itemsize, str(x.dtype).removeprefix("torch."), False)
