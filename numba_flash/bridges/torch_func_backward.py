"""The gradients of attention() as an autograd.Function: torch.func's transforms apply to a backward, too."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import arrays
from . import torch_vmap
from .static_call import StaticCall
from .torch_call import all_gradients, no_second_gradients, no_tangents
from .torch_operations import gradients_operation


class TransformedGradients(torch.autograd.Function):
    """The backward of `Transformed`, to which transforms apply in turn."""

    @staticmethod
    def forward(call: StaticCall, wanted: tuple[str, ...], *tensors: Any) -> Any:
        do, dlse, o, lse, *inputs = tensors
        try:
            return tuple(all_gradients(call, wanted, do, dlse, o, lse, inputs))
        except arrays.NeedsBridge:
            return tuple(gradients_operation(call, wanted, do, dlse, o, lse, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(no_second_gradients)
    jvp = staticmethod(no_tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: StaticCall, wanted: tuple[str, ...], *tensors: Any) -> Any:
        compute = functools.partial(TransformedGradients.apply, call, wanted)
        return torch_vmap.map_gradients(compute, info.batch_size, in_dims[2:], call, wanted, tensors)
