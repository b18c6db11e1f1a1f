"""The signature of torch.nn.attention.flex_attention, with or without torch.compile, with torch's block masks."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    BlockMask as BlockMask,
    and_masks as and_masks,
    create_block_mask as create_block_mask,
    or_masks as or_masks,
)

from ..api import forward as api
from ..bridges.torch_call import flatten
from ..bridges.torch_functions import IN_GRAPHS
from ..bridges.torch_operations import operation
from ..dispatch.call import NO_AUX
from ..dispatch.forward import AttentionOutput
from ..problem.forward import check_bool
from ..problem.options import FUNCTIONS, Options
from . import traced
from .arguments import number, renamed

NAMES = dict(q="query", k="key", v="value")
EMPTY, PARTIAL, FULL = range(3)  # states of a block: it sees no key, mask_mod decides, it sees all


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: "flex.BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """torch.nn.attention.flex_attention.flex_attention, with gradients, also of floating-point tensors captured by
    score_mod where the kernel has them (`numba_flash.attention_backward`).

    >>> o = flex_attention(query, key, value, score_mod=lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx))

    query: (batch, heads, seqlen_q, head_dim); key: (batch, heads_kv, seqlen_k, head_dim); value: (batch, heads_kv,
    seqlen_k, head_dim_v). key and value may have a batch of 1, and with enable_gqa=True fewer heads, which divide
    query's. scale: a number; None = head_dim ** -0.5.
    score_mod: (score, b, h, q_idx, kv_idx) -> score, made of torch's operations on numbers. It may capture numbers, and
    tensors of which it reads single elements, as in bias[h, q_idx]. Each call of flex_attention calls it once, and
    compiles it for kernels when it computes something new (numba_flash/compat/traced.py).
    block_mask: a result of torch's create_block_mask. As in torch, each of its blocks is hidden, seen whole, or decided
    by its mask_mod. GPU kernels find which of their own tiles are empty, and skip these (`numba_flash.attention`).
    Real numbers, and so the dtype of score, are float32 (float64 for float64 tensors).
    kernel_options: ignored; they tune torch's kernels and change no result.

    Returns o (batch, heads, seqlen_q, head_dim_v); with return_lse=True (o, lse), lse (batch, heads, seqlen_q) in
    float32, or float64 for float64; with return_aux=AuxRequest(lse=True) (o, AuxOutput).
    A query that sees no key gives 0, and its lse is -inf.

    Raises NotImplementedError for AuxRequest(max_scores=True) and for operations of torch that are not known; TypeError
    for functions that a kernel cannot be made of; TypeError and ValueError as `numba_flash.attention` does, with the
    names of these arguments.
    """
    computed = _outside_of_the_graph if torch.compiler.is_compiling() and not IN_GRAPHS else _computed
    return computed(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, return_aux)


def _outside_of_the_graph(*arguments: Any) -> Any:
    """torch.compile breaks its graph here and resumes after it, as for numba_flash.attention with functions."""
    import torch._dynamo  # takes a second at first; it is loaded whenever torch.compile calls this

    return torch._dynamo.disable(_computed)(*arguments)


_outside_of_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_the_graph._torchdynamo_disable_msg = "score_mod and block_mask are no part of a graph before torch 2.13"  # type: ignore[attr-defined]


def _computed(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: Any,
    return_lse: Any,
    return_aux: Any,
) -> Any:
    _check(query, key, value, enable_gqa, return_lse, return_aux)
    if scale is not None:
        scale = number("scale", scale)
    sizes = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
    lines = traced.Lines(query.device, torch.promote_types(query.dtype, torch.float32), sizes)
    given = score_mod, None if block_mask is None else _mask_mod(block_mask, query, key)
    bodies = {
        name: None if function is None else traced.write_down(lines, name, function)
        for name, function in zip(FUNCTIONS, given, strict=True)
    }
    if key.shape[0] != query.shape[0]:  # a batch of 1
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    both = return_lse or return_aux is not None
    found = _attend(query, key, value, scale, bodies, tuple(lines.tensors), both)
    if return_aux is not None:
        return found.o, flex.AuxOutput(lse=found.lse if return_aux.lse else None)
    return tuple(found) if return_lse else found


def _attend(query: Any, key: Any, value: Any, scale: Any, bodies: Any, aux: tuple[Tensor, ...], both: bool) -> Any:
    """Calls attention with the functions that the texts `bodies` define."""
    options = dict(scale=scale, q_offset=0)
    if any(bodies.values()) and torch.compiler.is_compiling():
        keys = [None if body is None else traced.key(name, len(aux), body) for name, body in bodies.items()]
        tensors, call = flatten(query, key, value, Options.of(**options), "auto")
        call = call._replace(options=call.options._replace(functions=tuple(keys)))
        found = AttentionOutput(*operation((*tensors, *aux), call))
        return found if both else found.o
    functions = {name: traced.compiled(name, len(aux), body) for name, body in bodies.items() if body}
    try:
        return api.attention(query, key, value, return_lse=both, aux=aux or NO_AUX, **functions, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise renamed(error, NAMES)  # noqa: B904 - the same error


def _check(query: Any, key: Any, value: Any, enable_gqa: Any, return_lse: Any, return_aux: Any) -> None:
    for name, x in dict(query=query, key=key, value=value).items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch tensor, not {type(x).__name__}")
        if x.is_nested:
            raise NotImplementedError(f"{name} is a nested tensor, which is not implemented; pass a padded one")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, heads, seqlen, head_dim), not of shape {tuple(x.shape)}")
        if x.device != query.device:
            raise ValueError(f"{name} must be on the device of query, {query.device}, not on {x.device}")
    check_bool("enable_gqa", enable_gqa)
    check_bool("return_lse", return_lse)
    if key.shape[0] != value.shape[0] or key.shape[0] not in (1, query.shape[0]):
        batches = ", ".join(f"{name} {len(x)}" for name, x in dict(query=query, key=key, value=value).items())
        raise ValueError(f"key and value must have the batch of query, or 1; batches are: {batches}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            "key must have as many heads as query without enable_gqa=True: query has "
            f"{query.shape[1]}, key {key.shape[1]}"
        )
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse and return_aux cannot both be given: write return_aux=AuxRequest(lse=True)")
        if return_aux.max_scores:
            raise NotImplementedError("return_aux with max_scores=True is not implemented; lse=True is")


def _mask_mod(block_mask: Any, query: Tensor, key: Tensor) -> Any:
    """A mask_mod of torch's operations that hides the same keys as the BlockMask."""
    if not isinstance(block_mask, flex.BlockMask):
        raise TypeError(f"block_mask must be a BlockMask of torch or None, not {type(block_mask).__name__}")
    lengths = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask is of (seqlen_q, seqlen_k) = {tuple(block_mask.seq_lengths)}, and query and key have {lengths}"
        )
    blocks = _kinds_of_blocks(block_mask)
    for axis, (name, size) in enumerate(dict(batch=query.shape[0], heads=query.shape[1]).items()):
        if blocks.shape[axis] not in (1, size):
            raise ValueError(f"block_mask has {blocks.shape[axis]} for {name}, and query {size}; it may have 1")
    rows, keys = block_mask.BLOCK_SIZE
    one_batch, one_head = blocks.shape[0] == 1, blocks.shape[1] == 1

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        kind = blocks[0 if one_batch else b, 0 if one_head else h, q_idx // rows, kv_idx // keys]
        return (kind == FULL) | (kind == PARTIAL) & block_mask.mask_mod(b, h, q_idx, kv_idx)

    return mask_mod


def _kinds_of_blocks(block_mask: Any) -> Tensor:
    """(batch or 1, heads or 1, blocks of queries, blocks of keys) int8: EMPTY, PARTIAL or FULL.

    A row's list has the indices of its blocks first, and then indices that do not count.
    """
    lists = [(block_mask.kv_num_blocks, block_mask.kv_indices, PARTIAL)]
    if block_mask.full_kv_num_blocks is not None:
        lists.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, FULL))
    of_keys = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    first = lists[0][1]
    # One more column, for the indices that do not count.
    kinds = torch.full((*first.shape[:-1], of_keys + 1), EMPTY, dtype=torch.int8, device=first.device)
    for counts, indices, kind in lists:
        counted = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        kinds.scatter_(-1, torch.where(counted, indices, of_keys).long(), kind)
    return kinds[..., :of_keys]
