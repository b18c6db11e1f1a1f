"""Views any number of leading dimensions, broadcast as torch does, as (batch, heads).

The leading dimensions of a tensor are all but its last two. Two neighbours become one dimension where every tensor
steps through both with one stride. The kernels take what is left when that is (batch, heads), or (batch, heads_kv,
group) with the same keys and values for a whole group.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def result_shape(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> tuple[int, ...]:
    """The shape of the result, for tensors or anything with a shape. Raises ValueError if torch's rules give none."""
    shapes = f"query has shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}"
    least = 3 if enable_gqa else 2
    for name, x in (("query", query), ("key", key), ("value", value)):
        if len(x.shape) < least:
            needed = "(..., heads, seqlen, head_dim) with enable_gqa=True" if enable_gqa else "(..., seqlen, head_dim)"
            raise ValueError(f"{name} must have at least {least} dimensions {needed}, but {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same last dimension, head_dim, but {shapes}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"key and value must have the same last dimension but one, seqlen_k, but {shapes}")
    if not query.shape[-1] or not value.shape[-1]:
        raise ValueError(f"query, key and value must have a last dimension of at least 1, but {shapes}")
    q, k, v = (tuple(x.shape[:-2]) for x in (query, key, value))
    if enable_gqa:
        _check_groups(q[-1], k[-1], v[-1], shapes)
        k, v = (*k[:-1], q[-1]), (*v[:-1], q[-1])
    scores, result = _broadcast(q, k), _broadcast(q, k, v)
    if scores is None or result is None:
        grouped = q and k and v and q[-1] != k[-1] == v[-1] != 0 and q[-1] % k[-1] == 0
        hint = "; where query heads share those of key and value, pass enable_gqa=True" if grouped else ""
        raise ValueError(
            f"query, key and value must be broadcastable before the last two dimensions, but {shapes}{hint}"
        )
    if attn_mask is not None:
        whole = (*scores, query.shape[-2], key.shape[-2])
        if len(attn_mask.shape) > len(whole) or _broadcast(whole, tuple(attn_mask.shape)) != whole:
            raise ValueError(
                f"attn_mask must be broadcastable to {whole}, not of shape {tuple(attn_mask.shape)}: {shapes}"
            )
    return (*result, query.shape[-2], value.shape[-1])


def _check_groups(heads: int, heads_k: int, heads_v: int, shapes: str) -> None:
    if heads == heads_k == heads_v:
        return
    if 0 in (heads_k, heads_v) or heads % heads_k or heads % heads_v:
        raise ValueError(f"with enable_gqa=True the heads of key and value must divide those of query, but {shapes}")
    if max(heads_k, heads_v) % min(heads_k, heads_v):
        raise NotImplementedError(
            f"with enable_gqa=True key and value must have the same number of heads, or one a multiple of the other's, "
            f"but {shapes}; repeat them to {heads} with repeat_interleave(..., dim=-3)"
        )


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape that these shapes broadcast to; None if they do not broadcast."""
    longest = max(map(len, shapes))
    aligned = zip(*((1,) * (longest - len(shape)) + shape for shape in shapes), strict=True)
    extents = [{extent for extent in extents if extent != 1} or {1} for extents in aligned]
    return tuple(extent for (extent,) in extents) if all(len(found) == 1 for found in extents) else None


def attend_by_views(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool, attend: Callable[..., Tensor]
) -> Tensor:
    """Calls attend(query, key, value[, attn_mask]), which takes 4 dimensions, for tensors checked by `result_shape`."""
    shape = result_shape(query, key, value, attn_mask, enable_gqa)
    tensors = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    if enable_gqa and not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        tensors = _with_groups(*tensors)
    dimensions = max(x.ndim for x in tensors)
    tensors = [x[(None,) * (dimensions - x.ndim)] for x in tensors]
    extents = [max(found) if min(found) else 0 for found in zip(*(x.shape[:-2] for x in tensors), strict=True)]
    return _attend(tensors, extents, attend).view(shape)


def _with_groups(query: Tensor, key: Tensor, value: Tensor, *attn_mask: Tensor) -> list[Tensor]:
    """heads as (fewer, more // fewer, heads // more), where key and value have `fewer` and `more` heads."""
    fewer, more = sorted((key.shape[-3], value.shape[-3]))
    groups = (fewer, more // fewer, query.shape[-3] // more)
    key, value = (x.unflatten(-3, (fewer, x.shape[-3] // fewer, 1)) for x in (key, value))
    masks = [x if x.ndim < 3 else x.unflatten(-3, (1, 1, 1) if x.shape[-3] == 1 else groups) for x in attn_mask]
    return [query.unflatten(-3, groups), key, value, *masks]


def _attend(tensors: list[Tensor], extents: list[int], attend: Callable[..., Tensor]) -> Tensor:
    """Calls attend by views. tensors: all of one number of dimensions; leading ones are as in `extents`, or 1."""
    if 0 in extents:
        return attend(*(x.expand(*extents, -1, -1).reshape(0, 1, *x.shape[-2:]) for x in tensors))
    tensors, extents = _folded(tensors, extents)
    query, key, value, *mask = tensors
    if (
        len(extents) == 3
        and key.shape[2] == value.shape[2] == 1
        and all(_one_stride(x, 1, extents) for x in (query, *mask))
    ):
        query, *mask = (_merged(x, 1, extents) for x in (query, *mask))
        key, value, extents = key.squeeze(2), value.squeeze(2), [extents[0], extents[1] * extents[2]]
    if len(extents) > 2:
        return _one_by_one(tensors, extents, attend)
    missing = 2 - len(extents)
    query, key, value, *mask = (x[(None,) * missing] for x in (query, key, value, *mask))
    batch, heads = [1] * missing + extents
    heads_kv = max(key.shape[1], value.shape[1])  # 1 where all heads have the same keys and values
    query = query.expand(batch, heads, -1, -1)
    key, value = (x.expand(batch, heads_kv, -1, -1) for x in (key, value))
    return attend(query, key, value, *mask)


def _folded(tensors: list[Tensor], extents: list[int]) -> tuple[list[Tensor], list[int]]:
    """Drops and merges leading dimensions as far as views allow. -> the tensors, and the extents that are left"""
    for axis in reversed(range(len(extents))):
        if extents[axis] == 1:
            tensors = [x.squeeze(axis) for x in tensors]
            extents = extents[:axis] + extents[axis + 1 :]
    for axis in reversed(range(len(extents) - 1)):
        if all(_one_stride(x, axis, extents) for x in tensors):
            tensors = [_merged(x, axis, extents) for x in tensors]
            extents = [*extents[:axis], extents[axis] * extents[axis + 1], *extents[axis + 2 :]]
    return tensors, extents


def _one_stride(x: Tensor, axis: int, extents: list[int]) -> bool:
    """Whether one stride leads through dimensions axis and axis + 1."""
    outer, inner = (0 if x.shape[a] == 1 else x.stride(a) for a in (axis, axis + 1))
    return outer == inner * extents[axis + 1]


def _merged(x: Tensor, axis: int, extents: list[int]) -> Tensor:
    """x with dimensions axis and axis + 1 as one; still 1 where x repeats in both."""
    before, (outer, inner), behind = x.shape[:axis], x.shape[axis : axis + 2], x.shape[axis + 2 :]
    if outer != 1 or inner != 1:
        outer, inner = extents[axis : axis + 2]
    return x.expand(*before, outer, inner, *behind).view(*before, outer * inner, *behind)


def _one_by_one(tensors: list[Tensor], extents: list[int], attend: Callable[..., Tensor]) -> Tensor:
    """Calls attention for each index of the shortest dimension. Tensors that repeat in it are expanded first, so that
    their gradients are summed once, in a sum's precision, and not rounded after each index."""
    axis = extents.index(min(extents))
    others = extents[:axis] + extents[axis + 1 :]
    pieces = zip(
        *(x.expand(*x.shape[:axis], extents[axis], *x.shape[axis + 1 :]).unbind(axis) for x in tensors), strict=True
    )
    results = (_attend(list(piece), others, attend) for piece in pieces)
    return torch.stack([o.view(*others, *o.shape[-2:]) for o in results], axis)
