"""attention() as an operation of torch: autograd, torch.func, torch.compile, torch.export, tracers, FakeTensor.

`numba_flash.attention` comes here by itself for tensors that require grad, and wherever torch records what is done to
tensors. dispatch/ computes it, as for `attention` and `attention_backward`. Here is what torch must know of it, in
three forms: an autograd.Function for eager calls, which is the cheapest; one in the parts that torch.func asks for;
and operations of torch's dispatcher, with schemas and shapes of results, for everything that traces.

Autocast leaves them alone, since nothing is cast in silence: q, k and v are of one dtype, as without it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import arrays
from ..arrays import recording
from ..dispatch import backward as gradients
from ..dispatch import forward as dispatch
from ..dispatch.backward import AttentionGradients
from ..dispatch.forward import NO_AUX, AttentionOutput, reject_unimplemented
from ..problem import forward as problem
from ..select import rungs
from . import torch_vmap

# The first arguments of both operations, which are tensors; and where the one stands that a gradient is of.
ARRAYS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "seqlens_k", "q_offset")
GRADIENT_OF = dict(dq=0, dk=1, dv=2, dbias=3, dalibi_slopes=5)
PLAIN = {Tensor, torch.nn.Parameter, type(None)}  # not a subclass that traces, such as FakeTensor
NO_SECOND_GRADIENTS = "the gradients of numba_flash.attention have no gradients themselves yet"
# A whole number: torch.compile(dynamic=True) makes a float that is a default an input of the graph, and cannot hand it
# to the second of two regions under torch.utils.checkpoint.
NO_DROPOUT = 0


# The arguments that are no tensors: q_offset, causal, window, scale, softcap, layout, kernel.
Call = tuple[Any, Any, Any, Any, Any, Any, Any]


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
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    layout: str = "bhsd",
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
) -> Any:
    """What torch.compile traces in the place of `numba_flash.attention`."""
    reject_unimplemented(sinks, dropout_p, seed)
    return run(
        q, k, v, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias, mask, score_mod, mask_mod,
        aux, layout, return_lse, out, stream, kernel,
    )  # fmt: skip


def run(
    q: Any, k: Any, v: Any, causal: Any, window: Any, q_offset: Any, seqlens_k: Any, scale: Any, softcap: Any,
    alibi_slopes: Any, bias: Any, mask: Any, score_mod: Any, mask_mod: Any, aux: Any, layout: Any, return_lse: Any,
    out: Any, stream: Any, kernel: Any,
) -> Any:  # fmt: skip
    """`dispatch.forward.run` for torch tensors, with gradients of q, k, v, bias and alibi_slopes, also through lse.

    The arguments and errors are the same, except that out and stream are refused: a result that has a gradient is
    memory of autograd's own, and work goes to torch's current stream. The gradients are computed by the kernel of the
    same name where it has a backward, else by "auto". They have no gradients themselves, and there is no forward mode:
    asking for those raises NotImplementedError.

    torch.func.grad, vjp, jacrev and vmap take it, in any order. vmap makes the mapped dimension part of the batch and
    calls once. That costs nothing for tensors that are contiguous with the mapped dimension first, and for those that
    are not mapped and have a batch of 1; others are copied into such a form.
    """
    if not score_mod is mask_mod is None or len(aux):
        raise NotImplementedError(recording.NO_FUNCTIONS)
    if out is not None or stream is not None:
        name = "stream" if out is None else "out"
        raise NotImplementedError(f"{name} cannot be given where torch records what is done, as it does for grad")
    offsets = None
    if isinstance(q_offset, Tensor):
        offsets, q_offset = q_offset, None
    tensors = (q, k, v, bias, mask, alibi_slopes, seqlens_k, offsets)
    call = (q_offset, causal, window, scale, softcap, layout, kernel)
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)):
        o, lse = _operation(call, tensors)
    elif torch._C._are_functorch_transforms_active():  # before all tracers: what it calls comes here again
        o, lse = _Transformed.apply(call, *tensors)
    elif torch._C._get_tracing_state() is not None or recording.recording_mode() is not None:
        o, lse = _operation(call, tensors)
    elif return_lse:
        o, lse = _record_both(call, *tensors)
    else:
        return _record(call, *tensors)
    return AttentionOutput(o, lse) if return_lse else o


def _operation(call: Call, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """By torch's dispatcher, where everything that traces sees it. It costs 75 us."""
    for name, x in zip(ARRAYS, tensors, strict=True):
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(x).__name__} beside torch tensors")
    if not torch.compiler.is_compiling():
        recording.refuse_tangents(tensors)
    q_offset, causal, window, *others = call
    return forward(*tensors, q_offset, causal, *problem.window_sides(window), *others)


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
    tensors = _without_grad(q, k, v, bias, mask, alibi_slopes, seqlens_k, q_offsets)
    return _both((q_offset, causal, (left, right), scale, softcap, layout, kernel), tensors)


def _both(call: Call, tensors: tuple[Any, ...]) -> Any:
    """o and lse of tensors for which torch records nothing now, unless an outer transform or tracer does."""
    q, k, v, bias, mask, alibi_slopes, seqlens_k, offsets = tensors
    q_offset, causal, window, scale, softcap, layout, kernel = call
    q_offset = q_offset if offsets is None else offsets
    try:
        return dispatch.run(
            q, k, v, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias, mask, None, None, NO_AUX,
            layout, True, None, None, kernel,
        )  # fmt: skip
    except arrays.NeedsBridge:
        pass
    return run(
        q, k, v, causal, window, q_offset, seqlens_k, scale, softcap, alibi_slopes, bias, mask, None, None, NO_AUX,
        layout, True, None, None, kernel,
    )  # fmt: skip


def _compute_gradients(
    wanted: str, do: Tensor | None, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor,
    bias: Tensor | None, mask: Tensor | None, alibi_slopes: Tensor | None, seqlens_k: Tensor | None,
    q_offsets: Tensor | None, q_offset: int | None, causal: bool, left: int | None, right: int | None,
    scale: float | None, softcap: float | None, layout: str, kernel: str,
) -> list[Tensor]:  # fmt: skip
    do, dlse, o, lse, *tensors = _without_grad(
        do, dlse, o, lse, q, k, v, bias, mask, alibi_slopes, seqlens_k, q_offsets
    )
    call = (q_offset, causal, (left, right), scale, softcap, layout, kernel)
    return _all_gradients(call, tuple(wanted.split()), do, dlse, o, lse, tensors)


def _all_gradients(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    """The gradients wanted, without None for the others."""
    found = _gradients_now(call, wanted, do, dlse, o, lse, tensors)
    return [gradient for gradient in found if gradient is not None]


def _gradients_now(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> AttentionGradients:
    """Of tensors for which torch records nothing now."""
    if do is None:
        do = torch.zeros_like(o)
    elif do.stride(-1) != 1:  # of sum().backward(): one number as a whole array, whose rows no tensor core could fetch
        do = do.contiguous()
    q, k, v, bias, mask, alibi_slopes, seqlens_k, offsets = tensors
    q_offset, causal, window, scale, softcap, layout, kernel = call
    return gradients.run(
        do, q, k, v, o, lse, dlse, wanted, causal, window, q_offset if offsets is None else offsets, seqlens_k, scale,
        softcap, alibi_slopes, bias, mask, None, None, NO_AUX, layout, True, None,
        kernel if kernel in rungs.WITH_BACKWARD else "auto",
    )  # fmt: skip


def _without_grad(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Inside an operation tensors still say that they require grad, though nothing is recorded there."""
    return tuple(None if x is None else x.detach() for x in tensors)


@functools.cache
def _wanted(needs: tuple[bool, ...]) -> tuple[str, ...]:
    """The gradients to compute. needs: of ARRAYS."""
    return tuple(name for name, argument in GRADIENT_OF.items() if needs[argument])


def _no_tangents(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(recording.NO_TANGENTS)


def _no_second_gradients(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(NO_SECOND_GRADIENTS)


class _Recorded(torch.autograd.Function):
    """For eager calls. Its arguments are a Call and the tensors; results are o alone, or o and lse."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        o, lse = _both(call, tensors)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        o, lse, *tensors = ctx.saved_tensors
        call, wanted = ctx.call, _wanted(ctx.needs_input_grad[1:])
        try:
            found = _gradients_now(call, wanted, do, dlse, o, lse, tensors)
        except arrays.NeedsBridge:  # with create_graph=True, in a transform or a trace
            if torch._C._are_functorch_transforms_active():
                named = _TransformedGradients.apply(call, wanted, do, dlse, o, lse, *tensors)
            else:
                named = _gradients_operation(call, wanted, do, dlse, o, lse, tensors)
            found = AttentionGradients(**dict(zip(wanted, named, strict=True)))
        dq, dk, dv, dbias, dalibi_slopes = found
        return None, dq, dk, dv, dbias, None, dalibi_slopes, None, None  # of the call and of ARRAYS

    jvp = staticmethod(_no_tangents)


class _RecordedBoth(_Recorded):
    """With lse as a result, which then has a gradient."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        o, lse = _both(call, tensors)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)  # the gradient of a result that nobody used is None
        return o, lse


# The inherited method, past Function's own: that looks for transforms, as `attention` has done, in 4 us.
_record = super(torch.autograd.Function, _Recorded).apply
_record_both = super(torch.autograd.Function, _RecordedBoth).apply


class _Transformed(_Recorded):
    """For torch.func, which takes a forward apart and wants to be told what its transforms make of it."""

    @staticmethod
    def forward(call: Call, *tensors: Any) -> Any:  # type: ignore[override]
        return tuple(_both(call, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        call, *tensors = inputs
        ctx.save_for_backward(*output, *tensors)
        ctx.call = call
        ctx.set_materialize_grads(False)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *tensors: Any) -> Any:
        size, batch = info.batch_size, torch_vmap.own_shape(tensors[0], in_dims[1])[0]
        folded = [
            torch_vmap.fold(name, x, dim, size, batch)
            for name, x, dim in zip(ARRAYS, tensors, in_dims[1:], strict=True)
        ]
        results = _Transformed.apply(call, *folded)
        return tuple(torch_vmap.unfold(x, size, batch) for x in results), (0, 0)


class _TransformedGradients(torch.autograd.Function):
    """The backward of `_Transformed`, which transforms take apart in their turn."""

    @staticmethod
    def forward(call: Call, wanted: tuple[str, ...], *tensors: Any) -> Any:
        do, dlse, o, lse, *inputs = tensors
        try:
            return tuple(_all_gradients(call, wanted, do, dlse, o, lse, inputs))
        except arrays.NeedsBridge:
            return tuple(_gradients_operation(call, wanted, do, dlse, o, lse, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(_no_second_gradients)
    jvp = staticmethod(_no_tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], call: Call, wanted: tuple[str, ...], *tensors: Any) -> Any:
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
        found = _TransformedGradients.apply(call, wanted, *folded.values())
        results = [
            torch_vmap.unfold_gradient(gradient, name, torch_vmap.own_shape(*given[name]), size, batch)
            for gradient, name in zip(found, of.values(), strict=True)
        ]
        results = [x.to(given[name][0].dtype) for x, name in zip(results, of.values(), strict=True)]
        return tuple(results), (0,) * len(results)


def _gradients_operation(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    q_offset, causal, window, *others = call
    return backward(
        " ".join(wanted), do, dlse, o, lse, *tensors, q_offset, causal, *problem.window_sides(window), *others
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[: len(ARRAYS)])
    ctx.others = inputs[len(ARRAYS) :]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    result: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    wanted = _wanted(tuple(ctx.needs_input_grad))
    found = backward(" ".join(wanted), do, dlse, *ctx.saved_tensors, *ctx.others)
    for name, gradient in zip(wanted, found, strict=True):
        result[GRADIENT_OF[name]] = gradient
    return tuple(result)


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
