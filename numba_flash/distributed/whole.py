"""shard() and unshard(): from the whole to a rank's part, and back. group_of() accepts what a caller gives as group."""

import weakref
import zlib
from typing import Any

import numpy as np

from .groups import Group, empty, namespace
from .layout import ZIGZAG, Layout, check_local, layout_of


def shard(x: Any, group: Any, dim: int, layout: str | Layout = ZIGZAG) -> Any:
    """This rank's tokens of x, where each rank has all of x.

    >>> tokens = numba_flash.distributed.shard(tokens, group, dim=1)

    group, layout: as for `context_parallel_attention`; `layout` by name takes any length. dim: the dimension of tokens.
    The result is a copy in the order of `layout`. Shard token ids, labels and positions, which have a value for each
    token, in the same way. torch's autograd goes through it.
    """
    if isinstance(group, str):
        from .jax_operation import shard as in_jax

        return in_jax(x, group, dim, layout)
    made = group_of(group)
    chosen = layout_of(layout, made.size, x.shape[dim])
    if x.shape[dim] != chosen.seqlen:
        raise ValueError(f"x must have {chosen.seqlen} tokens, those of layout, not {x.shape[dim]}")
    xp, before = namespace(x), (slice(None),) * (dim % x.ndim)
    runs = [x[(*before, slice(*run))] for run in chosen.runs(made.rank)]
    return xp.concat(runs or [x[(*before, slice(0))]], axis=dim)


def unshard(x: Any, group: Any, dim: int, layout: str | Layout = ZIGZAG, *, seqlen: int | None = None) -> Any:
    """The whole on each rank, from this rank's part of it: the reverse of `shard`, and a collective call.

    layout, seqlen: as for `context_parallel_attention`. It has no gradient; a loss is a mean of the ranks' own tokens.
    """
    if isinstance(group, str):
        from .jax_operation import unshard as in_jax

        return in_jax(x, group, dim, layout)
    if getattr(x, "requires_grad", False):
        raise NotImplementedError(
            "unshard has no gradient: compute the loss on each rank's own tokens, or pass x.detach()"
        )
    made = group_of(group)
    chosen = layout_of(layout, made.size, x.shape[dim] * made.size if seqlen is None else seqlen)
    check_local("x", x.shape[dim], chosen, made.rank)
    xp = namespace(x)
    parts = made.all_gather(xp.moveaxis(x, dim, 0), chosen.counts)
    whole = xp.zeros_like(xp.concat(parts, axis=0))
    for rank, part in enumerate(parts):
        at = 0
        for start, stop in chosen.runs(rank):
            whole[start:stop] = part[at : at + stop - start]
            at += stop - start
    return xp.moveaxis(whole, 0, dim)


def group_of(group: Any) -> Group:
    """A Group, as it is or made of a torch process group, a torch DeviceMesh of one dimension or a communicator of
    nccl4py."""
    if isinstance(group, Group):
        return group
    library = type(group).__module__.partition(".")[0]
    if library == "torch":
        from .torch_group import TorchGroup

        return TorchGroup(group)
    if library == "nccl":
        from .nccl_group import NcclGroup

        return NcclGroup(group)
    raise TypeError(
        "group must be a process group or a DeviceMesh of torch, a communicator of nccl4py, the name of a mesh axis "
        f"inside jax.shard_map, or a Group, not {type(group).__name__}"
    )


def peer_group(group: Any, *, memory: int = 256 << 20) -> Group:
    """The ranks of a torch process group on one host, whose GPUs read each other's memory.

    >>> group = numba_flash.distributed.peer_group(process_group)

    A Group for all calls of this module. Copy engines move the tokens, where NCCL's kernels take multiprocessors from
    attention. `group.transport` is then "copy engines". It is "nccl", with a RuntimeWarning that says why, where that
    cannot be: ranks on several hosts, GPUs that cannot read each other's memory, or a group of gloo.

    A collective call, to be made once, after torch.cuda.set_device. memory: bytes that each GPU lends to the others as
    long as the Group lives; exchanges of any size go through them. Needs torch's symmetric memory (torch 2.6).
    """
    from .peer_memory import of

    return of(group, memory)


_agreed: "weakref.WeakKeyDictionary[Any, set[Any]]" = weakref.WeakKeyDictionary()


def agree(given: Any, group: Group, like: Any, facts: dict[str, Any]) -> None:
    """Raises ValueError on each rank if `facts` are not equal on all. Otherwise messages would differ in size, and a
    library may then abort or give wrong numbers.

    The host waits for that, but only in the first call with these facts. given: the caller's group; like: an array of
    the group's device.
    """
    known, key = _agreed.setdefault(given, set()), tuple(facts.items())
    if group.size == 1 or key in known:
        return
    number = zlib.crc32(repr(facts).encode()) >> 1  # fits into an int32
    xp = namespace(like)
    own = empty(like, (1,), xp.int32, number)
    numbers = [
        int(np.asarray(x.cpu() if hasattr(x, "cpu") else x.get() if hasattr(x, "get") else x)[0])
        for x in group.all_gather(own, (1,) * group.size)
    ]
    if numbers != [number] * group.size:
        others = [rank for rank, other in enumerate(numbers) if other != number]
        raise ValueError(
            f"all ranks must call with equal shapes and options; ranks {others} have others than rank {group.rank}: "
            f"{facts}. If tokens differ, say how many there are in all: seqlen="
        )
    known.add(key)
