"""The gradients of attention() as a function of their own: torch.func's transforms take a backward apart, too."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import arrays
from . import torch_vmap
from .torch_call import ARRAYS, GRADIENT_OF, Call, all_gradients, no_second_gradients, no_tangents
from .torch_operations import gradients_operation


class TransformedGradients(torch.autograd.Function):
    """The backward of `Transformed`, which transforms take apart in their turn."""

    @staticmethod
    def forward(call: Call, wanted: tuple[str, ...], *tensors: Any) -> Any:
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
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[str, ...], *tensors: Any) -> Any:
        if call.options.functions is not None:
            one = functools.partial(TransformedGradients.apply, call, wanted)
            return torch_vmap.one_by_one(one, info.batch_size, in_dims[2:], tensors)
        names, dims = ("do", "dlse", "o", "lse", *ARRAYS), in_dims[2:]
        given = {name: (x, dim) for name, x, dim in zip(names, tensors, dims, strict=True)}
        size, batch = info.batch_size, torch_vmap.own_shape(*given["o"])[0]
        of = {name: ARRAYS[GRADIENT_OF[name]] for name in wanted}
        folded: dict[str, Any] = {
            name: torch_vmap.fold(name, x, dim, size, batch, own=name in of.values())
            for name, (x, dim) in given.items()
        }
        for name in of.values():
            if torch_vmap.is_summed(name, *given[name], batch):
                folded[name] = folded[name].to(given["lse"][0].dtype)  # rounded once, when all is added up
        found = TransformedGradients.apply(call, wanted, *folded.values())
        results = [
            torch_vmap.unfold_gradient(gradient, name, torch_vmap.own_shape(*given[name]), size, batch)
            for gradient, name in zip(found, of.values(), strict=True)
        ]
        results = [x.to(given[name][0].dtype) for x, name in zip(results, of.values(), strict=True)]
        return tuple(results), (0,) * len(results)
