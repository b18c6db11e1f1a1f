"""attention() as autograd.Functions, for eager calls: the form that costs the host least.

Only autograd records such a call. With create_graph=True its backward is recorded, too, and then takes one of the other
forms.
"""

from typing import Any

import torch
from torch import Tensor

from .. import arrays
from ..dispatch import backward as gradients
from ..dispatch.cached_call import CachedForward
from ..problem.options import AttentionGradients, daux_name
from .static_call import StaticCall, kernel_of_backward
from .torch_call import (
    ARRAYS,
    GRADIENT_OF,
    fetchable,
    flatten,
    forward_now,
    gradients_now,
    no_tangents,
    wanted_of,
)
from .torch_func_backward import TransformedGradients
from .torch_operations import gradients_operation

# For each of ARRAYS the index of its gradient in AttentionGradients; None: it has none.
FOUND_AT = [list(GRADIENT_OF.values()).index(n) if n in GRADIENT_OF.values() else None for n in range(len(ARRAYS))]


class Recorded(torch.autograd.Function):
    """For eager calls. Its arguments are a StaticCall and tensors: q, k and v alone if there are no others, or those
    of ARRAYS and aux. It returns o alone."""

    @staticmethod
    def forward(ctx: Any, call: StaticCall, *tensors: Any) -> Any:
        o, lse = forward_now(call, tensors)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        o, lse, *tensors = ctx.saved_tensors
        return (None, *_gradients_of(ctx.call, ctx.needs_input_grad[1:], do, dlse, o, lse, tensors))

    jvp = staticmethod(no_tangents)


class RecordedCached(Recorded):
    """For a repeated eager call, which takes dispatch's fast path; the result is o alone."""

    @staticmethod
    def forward(ctx: Any, cached: CachedForward, addresses: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:  # type: ignore[override]
        o, lse = cached.run(q, addresses)
        ctx.save_for_backward(o, lse, q, k, v)
        ctx.cached = cached
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, lse, q, k, v = ctx.saved_tensors
        cached, needs, do = ctx.cached, ctx.needs_input_grad[2:], fetchable(do)
        operands, kernel = (q, k, v, o, lse, do, None), kernel_of_backward(cached.kernel)
        found = gradients.find((operands, cached.options, True, wanted_of(needs), None, kernel))
        if found is not None:
            _, backward, inputs, incoming = found
            if backward is not None:
                return (None, None, *backward.run(q, inputs, incoming))
        call = StaticCall(cached.options, cached.kernel)
        return (None, None, *_gradients_of(call, needs, do, None, o, lse, (q, k, v)))


class RecordedBoth(Recorded):
    """Recorded, but returns lse, too; so lse has a gradient."""

    @staticmethod
    def forward(ctx: Any, call: StaticCall, *tensors: Any) -> Any:
        o, lse = forward_now(call, tensors)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)  # the gradient of a result that nobody used is None
        return o, lse


# The C base class's apply. Function's own also looks for transforms, in 4 us; `attention` has done that already.
record = super(torch.autograd.Function, Recorded).apply
record_cached = super(torch.autograd.Function, RecordedCached).apply
record_both = super(torch.autograd.Function, RecordedBoth).apply


def _gradients_of(
    call: StaticCall, needs: tuple[bool, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> tuple[Tensor | None, ...]:
    """Gradients of an eager call's tensors. needs: for each tensor whether its gradient is wanted."""
    wanted, aux = wanted_of(needs), range(len(tensors) - len(ARRAYS))
    try:
        found = gradients_now(call, wanted, do, dlse, o, lse, tensors)
    except arrays.NeedsBridge:  # with create_graph=True, in a transform or a trace
        if len(tensors) == 3:
            q, k, v = tensors
            tensors, call = flatten(q, k, v, call.options, call.kernel)
        if torch._C._are_functorch_transforms_active() or call.options.functions is not None:
            named = TransformedGradients.apply(call, wanted, do, dlse, o, lse, *tensors)
        else:
            named = gradients_operation(call, wanted, do, dlse, o, lse, tensors)
        by_name = dict(zip(wanted, named, strict=True))
        daux = tuple(by_name.pop(daux_name(number), None) for number in aux)
        found = AttentionGradients(**by_name, daux=daux)
    of_aux = found.daux or (None,) * len(aux)
    return (*[None if n is None else found[n] for n in FOUND_AT[: len(needs)]], *of_aux)
