"""attention() as an operation of torch: autograd, torch.func, torch.compile, torch.export, tracers, FakeTensor.

`numba_flash.attention` comes here by itself for tensors that require grad, and wherever torch records what is done to
tensors. dispatch/ computes it, as for `attention` and `attention_backward`. Here is what torch must know of it, in
three forms: an autograd.Function for eager calls, which is the cheapest; one in the parts that torch.func asks for;
and operations of torch's dispatcher, with schemas and shapes of results, for everything that traces.

Autocast leaves them alone, since nothing is cast in silence: q, k and v are of one dtype, as without it.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arrays
from ..arrays import recording
from ..dispatch import backward as gradients
from ..dispatch import forward as dispatch
from ..dispatch.block_mask import in_options
from ..dispatch.forward import AttentionOutput
from ..dispatch.repeated import Forward
from ..problem.forward import LAYOUTS
from ..problem.option_checks import window_sides
from ..problem.options import ARRAY_NAMES, NUMBERS, OPTION_ARRAYS, AttentionGradients, Options, daux_name
from ..problem.options import GRADIENT_OF as ARRAY_OF_GRADIENT
from ..select import rungs
from . import torch_vmap

# The first arguments of both operations, which are tensors; and where the one stands that a gradient is of.
ARRAYS = ("q", "k", "v", *ARRAY_NAMES)
NO_ARRAYS = (None,) * len(OPTION_ARRAYS)
GRADIENT_OF = {name: ARRAYS.index(of) for name, of in ARRAY_OF_GRADIENT.items()}
# Where the gradient of each of ARRAYS stands in AttentionGradients; None: it has none.
FOUND_AT = [list(GRADIENT_OF.values()).index(n) if n in GRADIENT_OF.values() else None for n in range(len(ARRAYS))]
PLAIN = {Tensor, torch.nn.Parameter, type(None)}  # not a subclass that traces, such as FakeTensor
NO_SECOND_GRADIENTS = "the gradients of numba_flash.attention have no gradients themselves yet"
NO_MAPPED_DROPOUT = (
    "dropout_p is not implemented under torch.func.vmap, because which weights count depends on the batch entry; make "
    "the mapped dimension part of the batch yourself"
)
# A whole number: torch.compile(dynamic=True) makes a float that is a default an input of the graph, and cannot hand it
# to the second of two regions under torch.utils.checkpoint.
NO_DROPOUT = 0


class Call(NamedTuple):
    """The arguments that are no tensors: Options without its arrays and aux, with its functions as they were read when
    the forward ran, and the kernel."""

    options: Options
    kernel: str


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    block_mask: Any = None,
    return_lse: bool = False,
    out: Any = None,
    stream: Any = None,
    kernel: str = "auto",
    **named: Any,
) -> Any:
    """What torch.compile traces in the place of `numba_flash.attention`."""
    if block_mask is not None:
        named |= in_options(block_mask, named)
    dropout = dict(dropout_p=dropout_p, seed=seed) if dropout_p else {}
    return run(q, k, v, Options.of(**named, **dropout), return_lse, out, stream, kernel)


def run(q: Any, k: Any, v: Any, options: tuple[Any, ...], return_lse: Any, out: Any, stream: Any, kernel: Any) -> Any:
    """`dispatch.forward.run` for torch tensors, with gradients of q, k, v and the options that have one, also
    through lse.

    The arguments and errors are the same, except that out and stream are refused: a result that has a gradient is
    memory of autograd's own, and work goes to torch's current stream. The gradients are computed by the kernel of the
    same name where it has a backward, else by "auto". They have no gradients themselves, and there is no forward mode:
    asking for those raises NotImplementedError.

    torch.func.grad, vjp, jacrev and vmap take it, in any order. vmap makes the mapped dimension part of the batch and
    calls once. That costs nothing for tensors that are contiguous with the mapped dimension first, and for those that
    are not mapped and have a batch of 1; others are copied into such a form. With score_mod or mask_mod, which are told
    the batch entry, it makes a call for each.
    """
    options = Options(*options)
    if out is not None or stream is not None:
        name = "stream" if out is None else "out"
        raise NotImplementedError(f"{name} cannot be given where torch records what is done, as it does for grad")
    if options.functions is not None:
        computed = _outside_of_the_graph if torch.compiler.is_compiling() else _run_with_functions
        return computed(q, k, v, options, return_lse, kernel)
    if torch.compiler.is_compiling() or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        o, lse = _operation(*_taken_apart(q, k, v, options, kernel))
    elif torch._C._are_functorch_transforms_active():  # before all tracers: what it calls comes here again
        tensors, call = _taken_apart(q, k, v, options, kernel)
        o, lse = _Transformed.apply(call, *tensors)
    elif torch._C._get_tracing_state() is not None or recording.recording_mode() is not None:
        o, lse = _operation(*_taken_apart(q, k, v, options, kernel))
    else:
        if options.arrays is None and not isinstance(options.q_offset, Tensor):  # autograd is told of three tensors
            tensors, call = (q, k, v), Call(options, kernel)
        else:
            tensors, call = _taken_apart(q, k, v, options, kernel)
            if not PLAIN.issuperset(map(type, tensors)):
                return _result(return_lse, *_operation(tensors, call))
        if not return_lse:
            return _record(call, *tensors)
        o, lse = _record_both(call, *tensors)
    return _result(return_lse, o, lse)


def run_again(known: Forward, addresses: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: Any) -> Any:
    """`run` of a call like one before, as `dispatch.forward.find` found it."""
    if return_lse:
        return run(q, k, v, known.options, return_lse, None, None, known.kernel)
    return _record_again(known, addresses, q, k, v)


def _result(return_lse: Any, o: Tensor, lse: Tensor) -> Any:
    return AttentionOutput(o, lse) if return_lse else o


def _run_with_functions(q: Any, k: Any, v: Any, options: Options, return_lse: Any, kernel: str) -> Any:
    """`run` with score_mod or mask_mod, which are no arguments that an operation could have."""
    tensors, call = _taken_apart(q, k, v, options, kernel)
    if torch._C._are_functorch_transforms_active():
        o, lse = _Transformed.apply(call, *tensors)
    elif torch._C._get_tracing_state() or recording.recording_mode() or not PLAIN.issuperset(map(type, tensors)):
        raise NotImplementedError(recording.NO_FUNCTIONS)
    elif return_lse:
        o, lse = _record_both(call, *tensors)
    else:
        return _record(call, *tensors)
    return AttentionOutput(o, lse) if return_lse else o


def _outside_of_the_graph(*arguments: Any) -> Any:
    """torch.compile leaves its graph here and comes back behind it: a graph could not tell that a function changed."""
    import torch._dynamo  # which takes a second, and is there when this is called

    return torch._dynamo.disable(_run_with_functions)(*arguments)


_outside_of_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
_outside_of_the_graph._torchdynamo_disable_msg = "score_mod and mask_mod are no part of a graph"  # type: ignore[attr-defined]
# It leaves for the call of `attention`, which it would then trace as it stands: nothing below dispatch is for it.
run_again._torchdynamo_disable = True  # type: ignore[attr-defined]
_frames = torch._C._dynamo.eval_frame
if hasattr(_frames, "_FrameExecStrategy"):  # else it traces there what it can, and warns
    _skip = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)  # also what it calls
    for _function in (*dispatch.NOT_TO_BE_TRACED, run_again):
        _frames.set_code_exec_strategy(_function.__code__, _skip)


def _taken_apart(q: Any, k: Any, v: Any, options: Options, kernel: str) -> tuple[tuple[Any, ...], Call]:
    """-> the tensors in the order of ARRAYS, behind them those of aux, and the rest."""
    offsets, q_offset = (options.q_offset, None) if isinstance(options.q_offset, Tensor) else (None, options.q_offset)
    functions, aux = (None, ()) if options.functions is None else dispatch.functions_of(options.functions)
    tensors = (q, k, v, *(options.arrays or NO_ARRAYS), offsets, *aux)
    rest = options._replace(q_offset=q_offset, arrays=None, functions=functions)
    return tensors, Call(rest, kernel)


def _put_together(call: Call, tensors: Any) -> tuple[Any, Any, Any, Options]:
    """-> q, k, v and the options with their tensors."""
    if len(tensors) == 3:
        return (*tensors, call.options)
    q, k, v, *arrays_given, offsets = tensors[: len(ARRAYS)]
    causal, window, q_offset, numbers, _, functions, layout, seed = call.options
    q_offset = q_offset if offsets is None else offsets
    functions = None if functions is None else (*functions, tuple(tensors[len(ARRAYS) :]))
    return q, k, v, Options(causal, window, q_offset, numbers, tuple(arrays_given), functions, layout, seed)


def _operation(tensors: tuple[Any, ...], call: Call) -> tuple[Tensor, Tensor]:
    """By torch's dispatcher, where everything that traces sees it. It costs 75 us."""
    for name, x in zip(ARRAYS, tensors, strict=True):
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(x).__name__} beside torch tensors")
    if not torch.compiler.is_compiling():
        recording.refuse_tangents(tensors)
    return forward(*tensors, *_flat(call))


def recorded(q: Tensor, k: Tensor, v: Tensor, options: Options, kernel: str) -> tuple[Tensor, Tensor]:
    """o and lse by torch's dispatcher, for tensors of any kind that it knows, such as meta tensors."""
    tensors, call = _taken_apart(q, k, v, options, kernel)
    return forward(*tensors, *_flat(call))


def _flat(call: Call) -> tuple[Any, ...]:
    """A call as an operation takes it; see SCHEMA."""
    causal, window, q_offset, numbers, _, _, layout, seed = call.options
    return (q_offset, causal, *window_sides(window), *numbers, seed, layout, call.kernel)


def _from_flat(flat: tuple[Any, ...]) -> Call:
    q_offset, causal, left, right, *numbers, seed, layout, kernel = flat
    return Call(Options(causal, (left, right), q_offset, tuple(numbers), None, None, layout, seed), kernel)


def autocast(x: Tensor) -> Tensor:
    """x as torch's own attention would take it here; for functions that stand in for it."""
    kind = x.device.type
    lower = torch.is_autocast_enabled(kind) and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return x.to(torch.get_autocast_dtype(kind)) if lower else x


def drawn_dropout(dropout_p: float) -> dict[str, Any]:
    """dropout_p and a seed from torch's generator in host memory, for functions that stand in for torch's own.

    To read the seed torch.compile leaves its graph, or with capture_scalar_outputs keeps it as a symbol.
    """
    return dict(dropout_p=dropout_p, seed=int(torch.randint(2**63 - 1, ())))


def _compute(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, flat = arguments[: len(ARRAYS)], arguments[len(ARRAYS) :]
    return _both(_from_flat(flat), _without_grad(*tensors))


def _both(call: Call, tensors: tuple[Any, ...]) -> Any:
    """o and lse of tensors for which torch records nothing now, unless an outer transform or tracer does."""
    q, k, v, options = _put_together(call, tensors)
    try:
        return dispatch.run(q, k, v, options, True, None, None, call.kernel)
    except arrays.NeedsBridge:
        pass
    return run(q, k, v, options, True, None, None, call.kernel)


def _compute_gradients(wanted: str, *arguments: Any) -> list[Tensor]:
    own = len(ARRAYS) + 4
    do, dlse, o, lse, *tensors = _without_grad(*arguments[:own])
    return _all_gradients(_from_flat(arguments[own:]), tuple(wanted.split()), do, dlse, o, lse, tensors)


def _all_gradients(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    """The gradients wanted, without None for the others."""
    found = _gradients_now(call, wanted, do, dlse, o, lse, tensors)
    return [gradient for gradient in (*found[:-1], *(found.daux or ())) if gradient is not None]


def _gradients_now(
    call: Call, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> AttentionGradients:
    """Of tensors for which torch records nothing now."""
    do = torch.zeros_like(o) if do is None else _fetchable(do)
    q, k, v, options = _put_together(call, tensors)
    return gradients.run(do, q, k, v, o, lse, dlse, wanted, options, True, None, _of_backward(call.kernel))


def _fetchable(do: Tensor) -> Tensor:
    """Of sum().backward() it is one number as a whole array, whose rows no tensor core could fetch."""
    return do if do.stride(-1) == 1 else do.contiguous()


def _of_backward(kernel: str) -> str:
    return kernel if kernel in rungs.WITH_BACKWARD else "auto"


def _without_grad(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Inside an operation tensors still say that they require grad, though nothing is recorded there."""
    return tuple(None if x is None else x.detach() for x in tensors)


@functools.cache
def _wanted(needs: tuple[bool, ...]) -> tuple[str, ...]:
    """The gradients to compute. needs: of q, k and v alone, or of ARRAYS, and behind them of aux."""
    of_aux = [daux_name(number) for number, needed in enumerate(needs[len(ARRAYS) :]) if needed]
    of_arrays = [name for name, argument in GRADIENT_OF.items() if argument < len(needs) and needs[argument]]
    return (*of_arrays, *of_aux)


def _no_tangents(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(recording.NO_TANGENTS)


def _no_second_gradients(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(NO_SECOND_GRADIENTS)


def _gradients_of(
    call: Call, needs: tuple[bool, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> tuple[Tensor | None, ...]:
    """Of the tensors of an eager call. needs: whose gradients are wanted."""
    wanted, aux = _wanted(needs), range(len(tensors) - len(ARRAYS))
    try:
        found = _gradients_now(call, wanted, do, dlse, o, lse, tensors)
    except arrays.NeedsBridge:  # with create_graph=True, in a transform or a trace
        if len(tensors) == 3:
            q, k, v = tensors
            tensors, call = _taken_apart(q, k, v, call.options, call.kernel)
        if torch._C._are_functorch_transforms_active() or call.options.functions is not None:
            named = _TransformedGradients.apply(call, wanted, do, dlse, o, lse, *tensors)
        else:
            named = _gradients_operation(call, wanted, do, dlse, o, lse, tensors)
        by_name = dict(zip(wanted, named, strict=True))
        daux = tuple(by_name.pop(daux_name(number), None) for number in aux)
        found = AttentionGradients(**by_name, daux=daux)
    of_aux = found.daux or (None,) * len(aux)
    return (*[None if n is None else found[n] for n in FOUND_AT[: len(needs)]], *of_aux)


class _Recorded(torch.autograd.Function):
    """For eager calls. Its arguments are a Call and the tensors: q, k and v where the Call has all else, or those of
    ARRAYS and aux. Results are o alone, or o and lse."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Any) -> Any:
        o, lse = _both(call, tensors)
        ctx.save_for_backward(o, lse, *tensors)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        o, lse, *tensors = ctx.saved_tensors
        return (None, *_gradients_of(ctx.call, ctx.needs_input_grad[1:], do, dlse, o, lse, tensors))

    jvp = staticmethod(_no_tangents)


class _RecordedAgain(_Recorded):
    """For an eager call like one before, of which dispatch knows what it does; the result is o alone."""

    @staticmethod
    def forward(ctx: Any, known: Forward, addresses: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:  # type: ignore[override]
        o, lse = known.run(q, addresses)
        ctx.save_for_backward(o, lse, q, k, v)
        ctx.known = known
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, lse, q, k, v = ctx.saved_tensors
        known, needs, do = ctx.known, ctx.needs_input_grad[2:], _fetchable(do)
        kernel = _of_backward(known.kernel)
        found = gradients.find(do, q, k, v, o, lse, _wanted(needs), known.options, True, kernel)
        if found is not None:
            _, inputs, incoming, again = found
            if again is not None:
                return (None, None, *again.run(q, inputs, incoming))
        call = Call(known.options, known.kernel)
        return (None, None, *_gradients_of(call, needs, do, None, o, lse, (q, k, v)))


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
_record_again = super(torch.autograd.Function, _RecordedAgain).apply
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
        if call.options.seed is not None:
            raise NotImplementedError(NO_MAPPED_DROPOUT)
        if call.options.functions is not None:
            return torch_vmap.one_by_one(
                functools.partial(_Transformed.apply, call), info.batch_size, in_dims[1:], tensors
            )
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
        if call.options.functions is not None:
            one = functools.partial(_TransformedGradients.apply, call, wanted)
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
    if call.options.functions is not None:
        raise NotImplementedError(recording.NO_FUNCTIONS)
    return backward(" ".join(wanted), do, dlse, o, lse, *tensors, *_flat(call))


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
backward.register_autograd(_no_second_gradients)


@forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    layout = others[-2]
    batch, heads, seqlen_q = (q.shape[axis] for axis in LAYOUTS[layout][:3])
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@backward.register_fake
def _(wanted: str, do: Any, dlse: Any, o: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
    return [inputs[GRADIENT_OF[name]].new_empty(inputs[GRADIENT_OF[name]].shape) for name in wanted.split()]
