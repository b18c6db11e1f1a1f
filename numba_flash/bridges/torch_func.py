"""attention() in the parts that torch.func asks for: grad, vjp, jacrev and vmap, in any order.

torch.func comes down its transforms one by one, and calls `forward` below all of them. So nothing but a tracer can
record what is done there.
"""

import functools
from typing import Any

from torch import Tensor

from .. import arrays
from ..problem.options import SEEDED
from . import torch_vmap
from .torch_call import ARRAYS, Call, forward_now
from .torch_eager import Recorded
from .torch_operations import operation

NO_MAPPED_SEED = (
    f"{SEEDED} is not implemented under torch.func.vmap, because which weights count depends on the batch entry; make "
    "the mapped dimension part of the batch yourself"
)


class Transformed(Recorded):
    """For torch.func, which takes a forward apart and wants to be told what its transforms make of it."""

    @staticmethod
    def forward(call: Call, *tensors: Any) -> Any:  # type: ignore[override]
        try:
            return tuple(forward_now(call, tensors))
        except arrays.NeedsBridge:
            return tuple(operation(tensors, call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *tensors: Any) -> Any:
        if call.options.seed is not None:
            raise NotImplementedError(NO_MAPPED_SEED)
        if call.options.functions is not None:
            return torch_vmap.one_by_one(
                functools.partial(Transformed.apply, call), info.batch_size, in_dims[1:], tensors
            )
        size, batch = info.batch_size, torch_vmap.own_shape(tensors[0], in_dims[1])[0]
        folded = [
            torch_vmap.fold(name, x, dim, size, batch)
            for name, x, dim in zip(ARRAYS, tensors, in_dims[1:], strict=True)
        ]
        results = Transformed.apply(call, *folded)
        return tuple(torch_vmap.unfold(x, size, batch) for x in results), (0, 0)
