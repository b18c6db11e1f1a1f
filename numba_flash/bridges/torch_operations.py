"""attention() and its gradients as operations of torch's dispatcher, with schemas and the shapes of their results.

All tracers see them there: torch.compile, torch.export, tracers, modes, FakeTensor, the meta device, and torch.func
inside of those. torch.func.grad cannot differentiate operations of torch.library.custom_op. So this module uses the
layer below: `_recorded` replaces custom_op's autograd, and handles one level of transforms at a time.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..arrays import recording
from ..problem.forward import LAYOUTS
from ..problem.option_checks import window_sides
from ..problem.options import FUNCTIONS, NUMBERS, OPTION_ARRAYS, Options
from . import torch_vmap
from .static_call import StaticCall
from .torch_call import (
    ARRAYS,
    GRADIENT_OF,
    SEED,
    all_gradients,
    flatten,
    forward_now,
    layout_of,
    layout_words,
    no_second_gradients,
    no_tangents,
    seed_words,
    wanted_of,
)
from .torch_functions import function_of, keys_of

Way = Callable[..., tuple[Any, StaticCall, Callable[[str, Tensor], Tensor]]]
_TENSORS = ("Tensor q", "Tensor k", "Tensor v", *(f"Tensor? {name}" for name in (*OPTION_ARRAYS, "q_offsets", "seed")))
_REST = (
    "SymInt? q_offset",
    "bool causal",
    "SymInt? left",
    "SymInt? right",
    *(f"float? {name}" for name in NUMBERS),
    "str layout",
    "SymInt? max_seqlen_q",
    "SymInt? max_seqlen_k",
    "str kernel",
)
_LAYOUT = _REST.index("str layout")
_GIVEN = "str wanted, Tensor? do, Tensor? dlse, Tensor o, Tensor lse"
_AUX = "Tensor[] aux"
_LIBRARY = torch.library.Library("numba_flash", "FRAGMENT")
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
_transforms_are_active = torch._C._are_functorch_transforms_active


def operation(tensors: tuple[Any, ...], call: StaticCall) -> tuple[Tensor, Tensor]:
    """Calls torch's dispatcher, so that tracers see one operation. That costs 75 us."""
    if any(type(x).__name__ == "DTensor" for x in tensors):
        from .torch_sharding import attend  # loads torch.distributed.tensor

        return attend(operation, tensors, call)
    names = (*ARRAYS, *[f"aux[{number}]" for number in range(len(tensors) - len(ARRAYS))])
    for name, x in zip(names, tensors, strict=True):
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(x).__name__} beside torch tensors")
    if not torch.compiler.is_compiling():
        _give_formulas()
    if call.options.functions is None:
        return forward(*schema_arguments(tensors, call))
    return forward_with_functions(*_arguments_with_functions(tensors, call))


def gradients_operation(
    call: StaticCall, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    _give_formulas()
    given = " ".join(wanted), do, dlse, o, lse
    if call.options.functions is None:
        return backward(*given, *schema_arguments(tensors, call))
    return backward_with_functions(*given, *_arguments_with_functions(tensors, call))


def recorded(q: Tensor, k: Tensor, v: Tensor, options: Options, kernel: str) -> tuple[Tensor, Tensor]:
    """o and lse by torch's dispatcher, for tensors of any kind that it knows, such as meta tensors."""
    return forward(*schema_arguments(*flatten(q, k, v, options, kernel)))


def schema_arguments(
    tensors: tuple[Any, ...], call: StaticCall, more: tuple[Any, ...] = (), numbers: tuple[Any, ...] = ()
) -> Any:
    """A call's arguments for an operation, with the `more` and `numbers` of `define`.

    A seed is a tensor, so that another seed needs no other graph. It may be any number from 0 to below 2**64.
    """
    causal, window, q_offset, own, _, _, layout, seed = call.options
    if seed is not None:
        tensors = (*tensors[:SEED], seed_words(seed))
    return (
        *tensors,
        *more,
        q_offset,
        causal,
        *window_sides(window),
        *own,
        *layout_words(layout),
        call.kernel,
        *numbers,
    )


def from_schema(rest: tuple[Any, ...]) -> StaticCall:
    q_offset, causal, left, right, *numbers = rest[:_LAYOUT]
    *layout, kernel = rest[_LAYOUT:]
    return StaticCall(Options(causal, (left, right), q_offset, tuple(numbers), None, None, layout_of(*layout)), kernel)


def _arguments_with_functions(tensors: tuple[Any, ...], call: StaticCall) -> Any:
    """A call's arguments for the operation attention_with_functions."""
    own = len(ARRAYS)
    return schema_arguments(tensors[:own], call, (), (*keys_of(call.options.functions), list(tensors[own:])))


def _with_functions(
    tensors: Any, call: StaticCall, score_mod: str | None, mask_mod: str | None, aux: list[Tensor]
) -> Any:
    functions = function_of(score_mod), function_of(mask_mod)
    call = call._replace(options=call.options._replace(functions=functions))
    return (*tensors, *_without_grad(aux)), call, lambda name, gradient: gradient


def _as_given(tensors: Any, call: StaticCall) -> Any:
    return tensors, call, lambda name, gradient: gradient


def define(name: str, more: tuple[str, ...] = (), numbers: tuple[str, ...] = (), way: Way = _as_given) -> Any:
    """The operations numba_flash::`name` and numba_flash::`name`_backward.

    more, numbers: the schema of further tensors and numbers; the last may be _AUX, a list of tensors. way(tensors,
    call, *more, *numbers) runs when the numbers are known. -> the tensors and the call to compute, and a function that
    turns their gradients into those of the given tensors.
    """
    own, read = len(ARRAYS), len(ARRAYS) + len(more)
    end, has_aux = read + len(_REST), numbers[-1:] == (_AUX,)

    def asked(arguments: Any) -> Any:
        tensors = _without_grad(arguments[:read])
        return way(tensors[:own], from_schema(arguments[read:end]), *tensors[own:], *arguments[end:])

    def packs(tensors: Any, arguments: Any) -> bool:
        """Whether packed sequences are computed in place of a batch of one."""
        return tensors[0].dim() < arguments[0].dim()

    def compute(*arguments: Any) -> Any:
        tensors, call, _ = asked(arguments)
        found = forward_now(call, tensors)
        return tuple([x[None] for x in found] if packs(tensors, arguments) else found)

    def compute_gradients(wanted: str, *arguments: Any) -> list[Tensor]:
        do, dlse, o, lse = _without_grad(arguments[:4])
        tensors, call, given_back = asked(arguments[4:])
        if packs(tensors, arguments[4:]):
            do, dlse, o, lse = (None if x is None else x[0] for x in (do, dlse, o, lse))
        names = tuple(wanted.split())
        found = all_gradients(call, names, do, dlse, o, lse, tensors)
        return [given_back(*pair) for pair in zip(names, found, strict=True)]

    def fake(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        axes = LAYOUTS.get(others[read - 3 + _LAYOUT], (1, 0))  # lse's axes in q; packed sequences have (heads, rows)
        of_lse = tuple(q.shape[axis] for axis in axes[: q.dim() - 1])
        lse = q.new_empty(of_lse, dtype=torch.promote_types(q.dtype, torch.float32))
        return q.new_empty((*q.shape[:-1], v.shape[-1])), lse

    def fake_gradients(wanted: str, do: Any, dlse: Any, o: Tensor, lse: Tensor, *inputs: Any) -> list[Tensor]:
        of = _flat(inputs)
        return [of[place(name)].new_empty(of[place(name)].shape) for name in wanted.split()]

    def place(gradient: str) -> int:
        """The index of the tensor that a gradient belongs to; aux comes behind all others."""
        found = GRADIENT_OF.get(gradient)
        return end + len(numbers) - 1 + int(gradient[5:-1]) if found is None else found

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        aux = inputs[end + len(numbers) - 1 :] if has_aux else ()
        ctx.save_for_backward(*output, *inputs[:read], *aux)
        ctx.others = inputs[read : len(inputs) - len(aux)]

    def gradients(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs, (o, lse, *tensors) = ctx.needs_input_grad[1:], ctx.saved_tensors
        aux = [tensors[read:]] if has_aux else []
        wanted = wanted_of((*needs[:own], *needs[len(needs) - len(tensors[read:]) :]))
        result: list[Tensor | None] = [None] * len(needs)
        found = backward(" ".join(wanted), do, dlse, o, lse, *tensors[:read], *ctx.others, *aux)
        for gradient_name, gradient in zip(wanted, found, strict=True):
            result[place(gradient_name)] = gradient
        return tuple(result)

    def flops(products: int, products_v: int, shapes: Any) -> int:
        """Counted as torch counts its own attention: each query with all keys, also those that it does not see."""
        (q, k, v), (layout, _, most) = shapes[:3], shapes[read + _LAYOUT : end - 1]
        if layout == "packed":
            keys = k[0] if most is None else min(k[0], most)
        else:
            keys = k[LAYOUTS[layout][-2]]
        return 2 * math.prod(q[:-1]) * keys * (products * q[-1] + products_v * v[-1])

    schema = ", ".join((*_TENSORS, *more, *_REST, *numbers))
    forward = _defined(name, f"({schema}) -> (Tensor, Tensor)", compute, fake, save, gradients)
    backward = _defined(
        f"{name}_backward",
        f"({_GIVEN}, {schema}) -> Tensor[]",
        compute_gradients,
        fake_gradients,
        lambda *unused: None,
        no_second_gradients,
    )
    _register_formula(forward, lambda *shapes, out_shape=None: flops(1, 1, shapes))
    _register_formula(backward, lambda *shapes, out_shape=None: flops(3, 2, shapes[5:]))
    return forward, backward


def _without_grad(tensors: Any) -> tuple[Any, ...]:
    """The tensors detached: inside an operation they still require grad, although nothing is recorded there."""
    return tuple([None if x is None else x.detach() for x in tensors])


def _flat(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with aux, a list at the end, flattened into single arguments."""
    return (*arguments[:-1], *arguments[-1]) if isinstance(arguments[-1], list) else arguments


def _defined(name: str, schema: str, compute: Any, fake: Any, save: Any, gradients: Any) -> Any:
    """Defines an operation of torch's dispatcher."""
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    defined = getattr(torch.ops.numba_flash, name).default
    torch.library.register_fake(f"numba_flash::{name}", fake, lib=_LIBRARY)
    _LIBRARY.impl(name, _recorded(defined, save, gradients), "Autograd", with_keyset=True)
    return defined


def _recorded(defined: Any, save: Any, gradients: Any) -> Any:
    """The operation's autograd kernel: records for autograd or one torch.func transform, then redispatches."""

    count = len(defined._schema.arguments)
    has_list = defined._schema.arguments[-1].name == "aux"

    def below(keyset: Any, arguments: Any) -> Any:
        if has_list:
            arguments = (*arguments[: count - 1], list(arguments[count - 1 :]))
        with torch._C._AutoDispatchBelowAutograd():
            return defined.redispatch(keyset & _BELOW_AUTOGRAD, *arguments)

    class Recorded(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def forward(ctx: Any, keyset: Any, *arguments: Any) -> Any:
            # the next transform records too, but autograd has disabled grad here
            outer = torch.enable_grad() if _transforms_are_active() else contextlib.nullcontext()
            with outer:
                found = below(keyset, arguments)
            ctx.set_materialize_grads(False)
            save(ctx, arguments, found)
            return tuple(found)

        @staticmethod
        def backward(ctx: Any, *incoming: Any) -> Any:
            return (None, *gradients(ctx, *incoming))

        jvp = staticmethod(no_tangents)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        arguments = _flat(arguments)  # autograd ignores tensors in a list
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        recording.refuse_tangents(tensors)
        if not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return below(keyset, arguments)
        with enable_single_level_autograd_function():
            found = Recorded.apply(keyset, *arguments)
        return found if len(defined._schema.returns) > 1 else list(found)

    return kernel


_FORMULAS: dict[Any, Any] = {}


def _register_formula(defined: Any, formula: Any) -> None:
    """Tells torch.utils.flop_counter how many floating-point operations a call of this operation takes."""
    packet = defined._overloadpacket
    _FORMULAS[packet] = flop_counter.register_flop_formula(packet)(formula)


def _give_formulas() -> None:
    """Adds our formulas to a FlopCounterMode made before this module was loaded: it has copied the older ones."""
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if registry is not None:
            registry.update(_FORMULAS)


forward, backward = define("attention")
forward_with_functions, backward_with_functions = define(
    "attention_with_functions", numbers=(*(f"str? {name}" for name in FUNCTIONS), _AUX), way=_with_functions
)


def _map(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    own = len(ARRAYS)
    call, rest = from_schema(arguments[own:]), arguments[own:]
    return torch_vmap.map_forward(
        lambda *tensors: forward(*tensors, *rest), info.batch_size, in_dims[:own], call, arguments[:own]
    )


def _map_gradients(info: Any, in_dims: tuple[Any, ...], wanted: str, *arguments: Any) -> Any:
    read = len(ARRAYS) + 4
    call, rest = from_schema(arguments[read:]), arguments[read:]
    found, out_dims = torch_vmap.map_gradients(
        lambda *tensors: backward(wanted, *tensors, *rest),
        info.batch_size,
        in_dims[1 : read + 1],
        call,
        tuple(wanted.split()),
        arguments[:read],
    )
    return list(found), list(out_dims)


def _map_with_functions(defined: Any) -> Any:
    """vmap's rule: a call for each entry, since functions get the index of the batch entry."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
        count, dims = len(arguments) - 1, (*in_dims[:-1], *in_dims[-1])
        found, out_dims = torch_vmap.one_by_one(
            lambda *flat: defined(*flat[:count], list(flat[count:])), info.batch_size, dims, _flat(arguments)
        )
        return (found, out_dims) if defined is forward_with_functions else (list(found), list(out_dims))

    return rule


if hasattr(torch.library, "register_vmap"):  # from 2.5 on; before that torch makes a call for each, if it can
    torch.library.register_vmap("numba_flash::attention", _map, lib=_LIBRARY)
    torch.library.register_vmap("numba_flash::attention_backward", _map_gradients, lib=_LIBRARY)
    for _defined_one in (forward_with_functions, backward_with_functions):
        torch.library.register_vmap(_defined_one, _map_with_functions(_defined_one), lib=_LIBRARY)
