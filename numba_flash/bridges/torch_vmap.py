"""torch.vmap of attention: the mapped dimension becomes part of the batch, so that it stays one call. Where the
number of a batch entry matters (static_call.py), each gets a call of its own instead.

Of arrays that are mapped with the batch this is a view where their strides allow it, which is so when the mapped
dimension comes first, and a copy where not. An array that is not mapped is repeated: without memory where it has a
batch of 1, else by copies, as many as there are in the mapped dimension.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem.options import BROADCAST, RANKS
from .static_call import NO_VMAP, StaticCall
from .torch_call import ARRAYS, GRADIENT_OF, SEED


def map_forward(attend: Callable[..., Any], size: int, dims: tuple[Any, ...], call: StaticCall, tensors: Any) -> Any:
    """The results of attend(*tensors), and where they are mapped. dims: where each tensor is; size: how often."""
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
    """The same of gradients. tensors: do, dlse, o, lse, and those of the forward."""
    if call.reads_entries(tensors[4 + SEED]):
        return one_by_one(compute, size, dims, tensors)
    names = ("do", "dlse", "o", "lse", *ARRAYS)
    given = {name: (x, dim) for name, x, dim in zip(names, tensors, dims, strict=True)}
    batch = own_shape(*given["o"])[0]
    of = {name: ARRAYS[GRADIENT_OF[name]] for name in wanted}
    folded: dict[str, Any] = {
        name: fold(name, x, dim, size, batch, own=name in of.values()) for name, (x, dim) in given.items()
    }
    folded["lse"] = folded["lse"].contiguous()  # kernels read it so, and of a batch of 1 it is repeated without memory
    for name in of.values():
        if is_summed(name, *given[name], batch):
            folded[name] = folded[name].to(given["lse"][0].dtype)  # rounded once, when all is added up
    results = [
        unfold_gradient(gradient, name, own_shape(*given[name]), size, batch).to(given[name][0].dtype)
        for gradient, name in zip(compute(*folded.values()), of.values(), strict=True)
    ]
    return tuple(results), (0,) * len(results)


def fold(name: str, x: Tensor | None, dim: int | None, size: int, batch: int, own: bool = False) -> Tensor | None:
    """An argument of one call for all of the mapped dimension. dim: where it stands in x, None = nowhere; size: how
    long it is; own: each is to have a gradient of its own, also of what all of them share."""
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
    """The gradient of what `fold` made of an argument of this shape, as that of the argument; it is mapped in front."""
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
    """The rule of a call whose mapped dimension cannot be part of the batch: a call for each."""
    results = [
        call(*[x if dim is None else x.select(dim, number) for x, dim in zip(tensors, in_dims, strict=True)])
        for number in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def own_shape(x: Tensor, dim: int | None) -> tuple[int, ...]:
    """Of each in the mapped dimension."""
    return tuple(n for at, n in enumerate(x.shape) if dim is None or at != dim % x.ndim)


def _mapped(x: Tensor, dim: int | None, size: int) -> Tensor:
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
