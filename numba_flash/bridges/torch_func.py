"""attention() in the parts that torch.func requires: for grad, vjp, jacrev and vmap, in any order.

torch.func applies its transforms one by one, and calls `forward` below all of them. So only a tracer can record the
operations there.
"""

import functools
from typing import Any

from torch import Tensor

from .. import arrays
from . import torch_vmap
from .static_call import StaticCall
from .torch_call import forward_now
from .torch_eager import Recorded
from .torch_operations import operation


class Transformed(Recorded):
    """For torch.func, which requires forward, setup_context and vmap as separate methods."""

    @staticmethod
    def forward(call: StaticCall, *tensors: Any) -> Any:  # type: ignore[override]
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
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: StaticCall, *tensors: Any) -> Any:
        attend = functools.partial(Transformed.apply, call)
        return torch_vmap.map_forward(attend, info.batch_size, in_dims[1:], call, tensors)
