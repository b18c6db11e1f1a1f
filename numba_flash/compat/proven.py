"""Attention in a program that torch.compile traces whole, where a mask may turn out to say no more than a window does.

While a program is traced, the numbers in its mask are not known. So it gets both ways to say which keys are seen, and
a proof of their equality: a bool on the host, worked out once in each run. The operation below reads it and takes the
kernels without a mask where it can. (torch.cond would be another way, but forgets what was written to a cache.)
"""

from typing import Any

import torch
from torch import Tensor

from ..api import backward as gradients
from ..api import forward as api

NAMES = ("dq", "dk", "dv", "dbias", "dsinks")


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, proof: Tensor, start: Tensor | None,
    stretch: dict[str, Any], masked: dict[str, Any], scale: float | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    """q, k, v as layout="bshd". With a proof that holds, the options `stretch` of keys that begin at `start`; else
    the options `masked`."""
    numbers, tensors = [], []
    for options in (stretch, masked):
        offset = options.get("q_offset")
        numbers += [*options.get("window", (None, None)), None if isinstance(offset, Tensor) else offset]
        tensors += [offset if isinstance(offset, Tensor) else None]
    return forward(
        q, k, v, bias, sinks, proof, start, stretch.get("seqlens_k"), masked["mask"], *tensors, *numbers, scale, softcap
    )[0]


def moved(start: Tensor | None, x: Tensor | None, axis: int) -> Any:
    """x with entry start[b] of batch entry b first along axis; what was before it comes last."""
    if start is None or x is None:
        return x
    index = (torch.arange(x.shape[axis], device=x.device) + start[:, None]) % x.shape[axis]
    shape = [1] * x.ndim
    shape[0], shape[axis] = index.shape
    return x.gather(axis, index.view(shape).expand_as(x))


def _options(
    proof: Tensor, start: Tensor | None, length: Tensor | None, mask: Tensor, offset: Tensor | None,
    masked_offset: Tensor | None, left: int | None, right: int | None, number: int | None, masked_left: int | None,
    masked_right: int | None, masked_number: int | None, scale: float | None, softcap: float | None,
) -> tuple[Tensor | None, dict[str, Any]]:  # fmt: skip
    options: dict[str, Any] = dict(scale=scale, softcap=softcap, layout="bshd")
    if proof.item():
        q_offset = number if offset is None else offset
        return start, options | dict(window=(left, right), q_offset=q_offset, seqlens_k=length)
    q_offset = masked_number if masked_offset is None else masked_offset
    return None, options | dict(window=(masked_left, masked_right), q_offset=q_offset, mask=mask)


def _compute(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, proof: Tensor, start: Tensor | None,
    length: Tensor | None, mask: Tensor, offset: Tensor | None, masked_offset: Tensor | None, left: int | None,
    right: int | None, number: int | None, masked_left: int | None, masked_right: int | None,
    masked_number: int | None, scale: float | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    start, options = _options(
        proof, start, length, mask, offset, masked_offset, left, right, number, masked_left, masked_right,
        masked_number, scale, softcap,
    )  # fmt: skip
    q, k, v, bias, sinks = (None if x is None else x.detach() for x in (q, k, v, bias, sinks))
    o, lse = api.attention(
        q, moved(start, k, 1), moved(start, v, 1), bias=moved(start, bias, 3), sinks=sinks, return_lse=True, **options
    )
    return o, lse


def _compute_gradients(
    wanted: str, do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    sinks: Tensor | None, proof: Tensor, start: Tensor | None, length: Tensor | None, mask: Tensor,
    offset: Tensor | None, masked_offset: Tensor | None, left: int | None, right: int | None, number: int | None,
    masked_left: int | None, masked_right: int | None, masked_number: int | None, scale: float | None,
    softcap: float | None,
) -> list[Tensor]:  # fmt: skip
    start, options = _options(
        proof, start, length, mask, offset, masked_offset, left, right, number, masked_left, masked_right,
        masked_number, scale, softcap,
    )  # fmt: skip
    do = do if do.stride(-1) == 1 else do.contiguous()
    do, q, k, v, o, lse, bias, sinks = (None if x is None else x.detach() for x in (do, q, k, v, o, lse, bias, sinks))
    options |= dict(bias=moved(start, bias, 3), sinks=sinks, wanted=tuple(wanted.split()))
    found = gradients.attention_backward(do, q, moved(start, k, 1), moved(start, v, 1), o, lse, **options)
    back = None if start is None else -start
    axes = dict(dk=1, dv=1, dbias=3)
    return [moved(back if name in axes else None, getattr(found, name), axes.get(name, 0)) for name in wanted.split()]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:11])
    ctx.others = inputs[11:]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    wanted = [i for i, _ in enumerate(NAMES) if ctx.needs_input_grad[i]]
    if do is not None:  # lse is for the backward alone
        found = backward(" ".join(NAMES[i] for i in wanted), do, *ctx.saved_tensors, *ctx.others)
        for i, gradient in zip(wanted, found, strict=True):
            result[i] = gradient
    return tuple(result)


def _no_second_gradients(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError("the gradients of numba_flash.attention have no gradients themselves yet")


forward = torch.library.custom_op("numba_flash::attention_proven", _compute, mutates_args=())
forward.register_autograd(_gradients, setup_context=_remember)
backward = torch.library.custom_op("numba_flash::attention_proven_backward", _compute_gradients, mutates_args=())
backward.register_autograd(_no_second_gradients)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads = q.shape[:3]
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@backward.register_fake
def _(wanted: str, do: Any, o: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for name, x in zip(NAMES, inputs, strict=False) if name in wanted.split()]
