"""torch.vmap of attention: the mapped dimension becomes part of the batch, so that it stays one call. Where the
number of a batch entry matters (static_call.py), each gets a call of its own instead.

For a mapped array this is a view if its strides allow it, as when the mapped dimension comes first; otherwise it is a
copy. An array that is not mapped is repeated: without memory if it has a batch of 1, otherwise by a copy for each index
of the mapped dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem.options import BROADCAST, RANKS
from .static_call import NO_VMAP, StaticCall
from .torch_call import ARRAYS, GRADIENT_OF, SEED


def map_forward(attend: Callable[..., Any], size: int, dims: tuple[Any, ...], call: StaticCall, tensors: Any) -> Any:
    """-> attend(*tensors), and its mapped dimensions. dims: each tensor's mapped dimension; size: its length."""
    if call.packed:
        raise NotImplementedError(NO_VMAP.format("torch"))
    if call.reads_entries(tensors[SEED]):
        return one_by_one(attend, size, dims, tensors)
    batch = own_shape(tensors[0], dims[0])[0]
    folded = [fold(name, x, dim, size, batch) for name, x, dim in zip(ARRAYS, tensors, dims, strict=True)]
    return tuple([unfold(x, size, batch) for x in attend(*folded)]), (0, 0)


def map_gradients(
    compute: Callable[..., Any],
    size: int,
    dims: tuple[Any, ...],
    call: StaticCall,
    wanted: tuple[str, ...],
    tensors: Any,
) -> Any:
    """map_forward for gradients. tensors: do, dlse, o, lse, and those of the forward."""
    if call.reads_entries(tensors[4 + SEED]):
        return one_by_one(compute, size, dims, tensors)
    names = ("do", "dlse", "o", "lse", *ARRAYS)
    given = {name: (x, dim) for name, x, dim in zip(names, tensors, dims, strict=True)}
    batch = own_shape(*given["o"])[0]
    of = {name: ARRAYS[GRADIENT_OF[name]] for name in wanted}
    folded: dict[str, Any] = {
        name: fold(name, x, dim, size, batch, own=name in of.values()) for name, (x, dim) in given.items()
    }
    folded["lse"] = folded["lse"].contiguous()  # kernels need it; a batch of 1 was repeated without memory
    for name in of.values():
        if is_summed(name, *given[name], batch):
            folded[name] = folded[name].to(given["lse"][0].dtype)  # rounded once, after the sum
    results = [
        unfold_gradient(gradient, name, own_shape(*given[name]), size, batch).to(given[name][0].dtype)
        for gradient, name in zip(compute(*folded.values()), of.values(), strict=True)
    ]
    return tuple(results), (0,) * len(results)


def fold(name: str, x: Tensor | None, dim: int | None, size: int, batch: int, own: bool = False) -> Tensor | None:
    """x with the mapped dimension folded into the batch. dim: the mapped dimension of x, None = x is not mapped; size:
    its length; own: each index gets a gradient of its own, also if all of them share x."""
    if x is None:
        return None
    if name in BROADCAST:
        shape = own_shape(x, dim)
        if dim is None and not own and _serves_whole_batch(name, shape):
            return x
        x = _mapped(x, dim, size).reshape(size, *(1,) * (RANKS[name] - len(shape)), *shape)
        x = x.expand(size, batch, *x.shape[2:]) if x.shape[1] == 1 else x
    else:
        x = _mapped(x, dim, size)
    return x.flatten(0, 1) if x.ndim > 1 else x


def unfold_gradient(gradient: Tensor, name: str, shape: tuple[int, ...], size: int, batch: int) -> Tensor:
    """The gradient of `fold`'s result as that of its argument, of this shape, with the mapped dimension in front."""
    gradient = unfold(gradient, size, batch)
    if _serves_whole_batch(name, shape):
        gradient = gradient.sum(1)
    return gradient.reshape(size, *shape)


def unfold(x: Tensor, size: int, batch: int) -> Tensor:
    """A result of the one call, with the mapped dimension in front."""
    return x.reshape(size, batch, *x.shape[1:])


def is_summed(name: str, x: Tensor, dim: int | None, batch: int) -> bool:
    """Whether `unfold_gradient` adds gradients up."""
    return batch > 1 and _serves_whole_batch(name, own_shape(x, dim))


def _serves_whole_batch(name: str, shape: tuple[int, ...]) -> bool:
    return name in BROADCAST and (len(shape) < RANKS[name] or shape[0] == 1)


def one_by_one(call: Callable[..., Any], size: int, in_dims: tuple[Any, ...], tensors: tuple[Any, ...]) -> Any:
    """The vmap rule if the mapped dimension cannot be part of the batch: a call for each index."""
    results = [
        call(*[x if dim is None else x.select(dim, number) for x, dim in zip(tensors, in_dims, strict=True)])
        for number in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def own_shape(x: Tensor, dim: int | None) -> tuple[int, ...]:
    """Shape of one entry of the mapped dimension."""
    return tuple(n for at, n in enumerate(x.shape) if dim is None or at != dim % x.ndim)


def _mapped(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
