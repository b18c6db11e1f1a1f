"""attention() and its gradients as operations of torch's dispatcher, with schemas and the shapes of their results.

Everything that traces sees them there: torch.compile, torch.export, tracers, modes, FakeTensor, the meta device.
"""

from typing import Any

import torch
from torch import Tensor

from ..arrays import recording
from ..problem.forward import LAYOUTS
from ..problem.option_checks import window_sides
from ..problem.options import NUMBERS, OPTION_ARRAYS, Options
from .torch_call import (
    ARRAYS,
    GRADIENT_OF,
    Call,
    all_gradients,
    forward_now,
    no_second_gradients,
    taken_apart,
    wanted_of,
)


def operation(tensors: tuple[Any, ...], call: Call) -> tuple[Tensor, Tensor]:
    """By torch's dispatcher, where everything that traces sees it. It costs 75 us."""
    if call.options.functions is not None:
        raise NotImplementedError(recording.NO_FUNCTIONS)
    for name, x in zip(ARRAYS, tensors, strict=True):
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(x).__name__} beside torch tensors")
    if not torch.compiler.is_compiling():
        recording.refuse_tangents(tensors)
    return forward(*tensors, *_flat(call))


def gradients_operation(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    if call.options.functions is not None:
        raise NotImplementedError(recording.NO_FUNCTIONS)
    return backward(" ".join(wanted), do, dlse, o, lse, *tensors, *_flat(call))


def recorded(q: Tensor, k: Tensor, v: Tensor, options: Options, kernel: str) -> tuple[Tensor, Tensor]:
    """o and lse by torch's dispatcher, for tensors of any kind that it knows, such as meta tensors."""
    tensors, call = taken_apart(q, k, v, options, kernel)
    return forward(*tensors, *_flat(call))


def _flat(call: Call) -> tuple[Any, ...]:
    """A call as an operation takes it; see _SCHEMA."""
    causal, window, q_offset, numbers, _, _, layout, seed = call.options
    return (q_offset, causal, *window_sides(window), *numbers, seed, layout, call.kernel)


def _from_flat(flat: tuple[Any, ...]) -> Call:
    q_offset, causal, left, right, *numbers, seed, layout, kernel = flat
    return Call(Options(causal, (left, right), q_offset, tuple(numbers), None, None, layout, seed), kernel)


def _compute(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, flat = arguments[: len(ARRAYS)], arguments[len(ARRAYS) :]
    return forward_now(_from_flat(flat), _without_grad(*tensors))


def _compute_gradients(wanted: str, *arguments: Any) -> list[Tensor]:
    own = len(ARRAYS) + 4
    do, dlse, o, lse, *tensors = _without_grad(*arguments[:own])
    return all_gradients(_from_flat(arguments[own:]), tuple(wanted.split()), do, dlse, o, lse, tensors)


def _without_grad(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Inside an operation tensors still say that they require grad, though nothing is recorded there."""
    return tuple(None if x is None else x.detach() for x in tensors)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(ARRAYS)])
    ctx.others = inputs[len(ARRAYS) :]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    wanted = wanted_of(tuple(ctx.needs_input_grad))
    found = backward(" ".join(wanted), do, dlse, *ctx.saved_tensors, *ctx.others)
    for name, gradient in zip(wanted, found, strict=True):
        result[GRADIENT_OF[name]] = gradient
    return tuple(result)


_SCHEMA = ", ".join(
    [
        "Tensor q, Tensor k, Tensor v",
        *(f"Tensor? {name}" for name in OPTION_ARRAYS),
        "Tensor? q_offsets",
        "SymInt? q_offset, bool causal, SymInt? left, SymInt? right",
        *(f"float? {name}" for name in NUMBERS),
        "SymInt? seed",
        "str layout, str kernel",
    ]
)
_GIVEN = "str wanted, Tensor? do, Tensor? dlse, Tensor o, Tensor lse"
forward = torch.library.custom_op(
    "numba_flash::attention", _compute, mutates_args=(), schema=f"({_SCHEMA}) -> (Tensor, Tensor)"
)
forward.register_autograd(_gradients, setup_context=_remember)
backward = torch.library.custom_op(
    "numba_flash::attention_backward", _compute_gradients, mutates_args=(), schema=f"({_GIVEN}, {_SCHEMA}) -> Tensor[]"
)
backward.register_autograd(no_second_gradients)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    layout = others[-2]
    batch, heads, seqlen_q = (q.shape[axis] for axis in LAYOUTS[layout][:3])
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@backward.register_fake
def _(wanted: str, do: Any, dlse: Any, o: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
    return [inputs[GRADIENT_OF[name]].new_empty(inputs[GRADIENT_OF[name]].shape) for name in wanted.split()]
