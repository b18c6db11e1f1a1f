"""attention() as an operation of torch: autograd, torch.compile, torch.export, FakeTensor.

`numba_flash.attention` comes here by itself for tensors that require grad, and wherever torch.compile traces it.
What is computed is what `attention` and `attention_backward` compute; here is only what torch must know of it: the
operations' schemas, the shapes of their results, and which is the derivative of which.

Autocast leaves them alone, since nothing is cast in silence: q, k and v are of one dtype, as without it.
"""

from typing import Any

import torch
from torch import Tensor

from .. import api, gradients, problem, select_backward
from ..api import AttentionOutput

# The first arguments of both operations, which are tensors; and where the one stands that a gradient is of.
ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "seqlens_k", "q_offset")
GRADIENT_OF = dict(dq=0, dk=1, dv=2, dbias=3, dalibi_slopes=5)
PLAIN = (Tensor, torch.nn.Parameter)  # not a subclass that traces, such as FakeTensor


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: Any = None,
    seqlens_k: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    bias: Any = None,
    mask: Any = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    aux: tuple[Any, ...] = (),
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
) -> Any:
    """`numba_flash.attention` for torch tensors, with gradients of q, k, v, bias and alibi_slopes, also through lse.

    >>> numba_flash.attention(q, k, v, causal=True).square().mean().backward()

    The arguments and errors are those of `numba_flash.attention`, except that out and stream are refused: a
    result that has a gradient is memory of autograd's own, and work goes to torch's current stream. The gradients
    are computed by the kernel of the same name where it has a backward, else by "auto". They have no gradients
    themselves; asking for those raises NotImplementedError. Forward mode is not there: torch.func refuses it, and a
    dual tensor that requires no grad loses its tangent.
    """
    api.refuse_what_is_to_come(score_mod, mask_mod, aux, sinks, dropout_p, seed)
    for name, given in (("out", out), ("stream", stream)):
        if given is not None:
            raise NotImplementedError(f"{name} cannot be given where torch records what is done, as it does for grad")
    offsets, q_offset = (q_offset, None) if isinstance(q_offset, Tensor) else (None, q_offset)
    arrays = (q, k, v, bias, mask, alibi_slopes, seqlens_k, offsets)
    for name, array in zip(ARRAYS, arrays, strict=True):
        if not isinstance(array, Tensor) and (array is not None or name in ("q", "k", "v")):
            raise TypeError(
                f"all arrays must be of one kind, but {name} is {type(array).__name__} beside torch tensors"
            )
    left, right = problem.window_sides(window)
    # The dispatcher, which lets torch see an operation to trace, costs 75 us a call in which nobody traces.
    traced = torch.compiler.is_compiling() or any(x is not None and type(x) not in PLAIN for x in arrays)
    operation = forward if traced else _Recorded.apply
    o, lse = operation(*arrays, q_offset, causal, left, right, scale, softcap, layout, kernel)
    return AttentionOutput(o, lse) if return_lse else o


def autocast(x: Tensor) -> Tensor:
    """x as torch's own attention would take it here; for functions that stand in for it."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def _compute(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None,
    seqlens_k: Tensor | None, q_offsets: Tensor | None, q_offset: int | None, causal: bool, left: int | None,
    right: int | None, scale: float | None, softcap: float | None, layout: str, kernel: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    options = _options(
        bias, mask, alibi_slopes, seqlens_k, q_offsets, q_offset, causal, left, right, scale, softcap, layout
    )
    o, lse = api.attention(*_without_grad(q, k, v), return_lse=True, kernel=kernel, **options)
    return o, lse


def _compute_gradients(
    wanted: str, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, seqlens_k: Tensor | None,
    q_offsets: Tensor | None, q_offset: int | None, causal: bool, left: int | None, right: int | None,
    scale: float | None, softcap: float | None, layout: str, kernel: str,
) -> list[Tensor]:  # fmt: skip
    if do is None:
        do = torch.zeros_like(o)
    elif do.stride(-1) != 1:  # of sum().backward(): one number as a whole array, whose rows no tensor core could fetch
        do = do.contiguous()
    arrays = _without_grad(do, q, k, v, o, lse)
    options = _options(
        bias, mask, alibi_slopes, seqlens_k, q_offsets, q_offset, causal, left, right, scale, softcap, layout
    )
    kernel = kernel if kernel in select_backward.BUILT else "auto"
    found = gradients.attention_backward(
        *arrays, dlse=dlse if dlse is None else dlse.detach(), wanted=tuple(wanted.split()), kernel=kernel, **options
    )
    return [gradient for gradient in found if gradient is not None]


def _options(
    bias: Any, mask: Any, alibi_slopes: Any, seqlens_k: Any, q_offsets: Any, q_offset: Any, causal: Any, left: Any,
    right: Any, scale: Any, softcap: Any, layout: Any,
) -> dict[str, Any]:  # fmt: skip
    """What both operations take, as `attention` and `attention_backward` take it."""
    bias, mask, alibi_slopes, seqlens_k, q_offsets = _without_grad(bias, mask, alibi_slopes, seqlens_k, q_offsets)
    return dict(
        bias=bias, mask=mask, alibi_slopes=alibi_slopes, seqlens_k=seqlens_k,
        q_offset=q_offset if q_offsets is None else q_offsets, causal=causal, window=(left, right), scale=scale,
        softcap=softcap, layout=layout,
    )  # fmt: skip


def _without_grad(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Inside an operation tensors still say that they require grad, though nothing is recorded there."""
    return tuple(None if x is None else x.detach() for x in tensors)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(ARRAYS)])
    ctx.others = inputs[len(ARRAYS) :]
    ctx.set_materialize_grads(False)  # the gradient of a result that nobody used is None


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    wanted = [name for name, argument in GRADIENT_OF.items() if ctx.needs_input_grad[argument]]
    found = backward(" ".join(wanted), do, dlse, *ctx.saved_tensors, *ctx.others)
    for name, gradient in zip(wanted, found, strict=True):
        result[GRADIENT_OF[name]] = gradient
    return tuple(result)


def _no_second_gradients(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError("the gradients of numba_flash.attention have no gradients themselves yet")


class _Recorded(torch.autograd.Function):
    """Autograd without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _compute(*inputs)
        _remember(ctx, inputs, output)
        return output

    backward = staticmethod(_gradients)


forward = torch.library.custom_op("numba_flash::attention", _compute, mutates_args=())
forward.register_autograd(_gradients, setup_context=_remember)
backward = torch.library.custom_op("numba_flash::attention_backward", _compute_gradients, mutates_args=())
backward.register_autograd(_no_second_gradients)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    layout = others[-2]
    batch, heads, seqlen_q = (q.shape[axis] for axis in problem.LAYOUTS[layout][:3])
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@backward.register_fake
def _(wanted: str, do: Any, dlse: Any, o: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
    return [inputs[GRADIENT_OF[name]].new_empty(inputs[GRADIENT_OF[name]].shape) for name in wanted.split()]
