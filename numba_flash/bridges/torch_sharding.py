"""attention of DTensors: each device computes its own batch entries and heads, and nothing is sent.

q determines the split: along each dimension of its mesh it is sharded over the batch, sharded over the heads, or
replicated. The other arrays must be split in the same way, but broadcast ones and aux must be replicated. The gradient
of a broadcast array is then a sum over devices (Partial), which DTensor forms when it is needed.
"""

import math
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from ..problem.forward import LAYOUTS
from ..problem.options import BY_NAME, SEEDED
from .static_call import StaticCall
from .torch_call import ARRAYS, SEED
from .torch_functions import keys_of, numbered_by_keys

BATCH, HEADS = "batch", "heads"


def attend(operation: Any, tensors: tuple[Any, ...], call: StaticCall) -> Any:
    """Runs `operation` on each device's parts. -> (o, lse) as DTensors. tensors: as in ARRAYS."""
    q, k = tensors[:2]
    if not isinstance(q, DTensor):
        raise TypeError("all arrays must be of one kind, but q is no DTensor beside DTensors")
    layout = call.options.layout
    splits = [_split_of(placement, layout) for placement in q.placements]
    if tensors[SEED] is not None or call.options.seed is not None:
        raise NotImplementedError(
            f"{SEEDED} of DTensors is not implemented: which weights are dropped follows from their batch entry and "
            "head, counted over all devices"
        )
    _check_functions(call.options.functions, splits)
    _check_heads(k.shape[_axis("k", k, HEADS, layout)], q.device_mesh, splits)
    _check_batch(q, splits, layout)
    given, of_gradients = [], []
    names = (*ARRAYS, *[f"aux[{number}]" for number in range(len(tensors) - len(ARRAYS))])
    for name, x in zip(names, tensors, strict=True):
        wanted = x if x is None else tuple(_placement(name, x, split, layout) for split in splits)
        _check_placements(name, x, q, wanted)
        given.append(wanted)
        of_gradients.append(wanted and tuple(map(_of_gradient, wanted, splits)))
    results = (tuple(_placement(name, q, split, layout) for split in splits) for name in ("o", "lse"))
    mapped = local_map(
        lambda *parts: operation(parts, call), tuple(results), tuple(given), tuple(of_gradients), q.device_mesh
    )
    return mapped(*tensors)


def _split_of(placement: Placement, layout: Any) -> str:
    """The dimension of q that a placement shards: BATCH, HEADS or "" if q is replicated."""
    if placement.is_replicate():
        return ""
    names = {_axis("q", None, split, layout): split for split in (BATCH, HEADS)}
    split = names.get(getattr(placement, "dim", None)) if type(placement) is Shard else None
    if split is None:
        raise NotImplementedError(
            f"q is placed as {placement}, and attention of DTensors takes it sharded over the batch or heads, or "
            "replicated: redistribute() it"
        )
    return split


def _axis(name: str, x: Any, split: str, layout: Any) -> int | None:
    """The axis of an array for `split` (BATCH or HEADS); None if it has none, or is broadcast along it."""
    number = (BATCH, HEADS).index(split)
    packed = layout not in LAYOUTS
    if name in ("q", "k", "v", "o"):
        return (None, 1)[number] if packed else LAYOUTS[layout][number]
    if name == "lse":
        return (None, 0)[number] if packed else number
    shape = BY_NAME[name].shape if name in BY_NAME else ""  # aux has none
    behind = dict(scores=(4, 3), heads=(2, 1), batch=(1, None)).get(shape, (None, None))[number]
    axis = None if behind is None else x.ndim - behind
    return axis if axis is not None and axis >= 0 and x.shape[axis] != 1 else None


def _placement(name: str, x: Any, split: str, layout: Any) -> Placement:
    axis = _axis(name, x, split, layout) if split else None
    return Replicate() if axis is None else Shard(axis)


def _of_gradient(placement: Placement, split: str) -> Placement:
    return Partial() if split and placement.is_replicate() else placement


def _check_functions(functions: Any, splits: list[str]) -> None:
    """Refuses functions that read an index which is split: a device counts batch entries and heads from 0."""
    for split in {*splits} & {BATCH, HEADS} if functions is not None else ():
        option = numbered_by_keys(keys_of(functions), split[0])
        if option is not None:
            raise NotImplementedError(
                f"{option} reads the number of the {'batch entry' if split == BATCH else 'head'}, which a device does "
                f"not know where q is sharded over the {split}: replicate q, or give what it reads as bias= or mask="
            )


def _check_heads(heads_kv: int, mesh: Any, splits: list[str]) -> None:
    """Checks that all devices get equally many KV heads, so that query heads stay with their KV head."""
    devices = math.prod([size for size, split in zip(mesh.shape, splits, strict=True) if split == HEADS])
    if heads_kv % devices:
        raise NotImplementedError(f"k has {heads_kv} heads, which cannot be shared out evenly to {devices} devices")


def _check_batch(q: DTensor, splits: list[str], layout: Any) -> None:
    """Checks that all parts have one size: results' shapes are computed from a part's. Each device checks its own."""
    if BATCH not in splits:
        return
    axis = LAYOUTS[layout][0]
    devices = math.prod([size for size, split in zip(q.device_mesh.shape, splits, strict=True) if split == BATCH])
    if q.to_local().shape[axis] * devices != q.shape[axis]:
        raise NotImplementedError(
            f"q has {q.shape[axis]} batch entries, which are not shared out evenly to {devices} devices"
        )


def _check_placements(name: str, x: Any, q: DTensor, wanted: Any) -> None:
    if x is None:
        return
    if not isinstance(x, DTensor):
        raise TypeError(f"all arrays must be of one kind, but {name} is {type(x).__name__} beside DTensors")
    if x.device_mesh != q.device_mesh:
        raise ValueError(f"{name} must be on the mesh of q")
    if tuple(x.placements) != wanted:
        raise ValueError(f"{name} must be placed as {wanted}, like q, and not as {x.placements}: redistribute() it")
