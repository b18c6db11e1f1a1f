"""Flattens a call for torch's operations, and computes results and gradients from it.

torch takes tensors one by one. So a call is flattened into its tensors, in one order, and a StaticCall, which has all
the rest. It is unflattened where dispatch/ computes it.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ..arrays import recording
from ..dispatch import backward as gradients, caller_functions, forward as dispatch
from ..dispatch.call import Call
from ..dispatch.seed import seed_number
from ..problem.options import (
    ARRAY_NAMES,
    GRADIENT_OF as ARRAY_OF_GRADIENT,
    OPTION_ARRAYS,
    AttentionGradients,
    Options,
    Packed,
    daux_name,
)
from .static_call import StaticCall, kernel_of_backward
from .torch_functions import traced_keys

# The first arguments of both operations, which are tensors; and for each gradient the index of its tensor.
ARRAYS = ("q", "k", "v", *ARRAY_NAMES, "seed")
SEED = ARRAYS.index("seed")
NO_ARRAYS = (None,) * len(OPTION_ARRAYS)
GRADIENT_OF = {name: ARRAYS.index(of) for name, of in ARRAY_OF_GRADIENT.items()}
NO_SECOND_GRADIENTS = "the gradients of numba_flash.attention have no gradients themselves yet"


def flatten(q: Any, k: Any, v: Any, options: Options, kernel: str) -> tuple[tuple[Any, ...], StaticCall]:
    """-> the tensors in the order of ARRAYS, followed by those of aux; and the StaticCall."""
    offsets, q_offset = (options.q_offset, None) if isinstance(options.q_offset, Tensor) else (None, options.q_offset)
    seeds, seed = (options.seed, None) if isinstance(options.seed, Tensor) else (None, options.seed)
    if seeds is not None and (seeds.numel() != 1 or seeds.is_floating_point() or seeds.dtype == torch.bool):
        raise TypeError(f"seed must be a whole number, or a tensor of one, not {seeds.dtype} of {tuple(seeds.shape)}")
    functions, aux = _functions_of(options.functions)
    tensors = (q, k, v, *(options.arrays or NO_ARRAYS), offsets, seeds, *aux)
    # not by _replace, which torch.compile of torch 2.4 does not trace
    rest = Options(options.causal, options.window, q_offset, options.numbers, None, functions, options.layout, seed)
    return tensors, StaticCall(rest, kernel)


def _functions_of(given: Any) -> tuple[Any, tuple[Any, ...]]:
    """The functions as values, or as keys where torch traces; and aux."""
    if given is None:
        return None, ()
    return traced_keys(given) if torch.compiler.is_compiling() else caller_functions.functions_of(given)


def layout_words(layout: Any) -> tuple[Any, ...]:
    """A layout as an operation takes it: a word, and the bounds of packed sequences as numbers, which may differ in
    each run of a graph."""
    return ("packed", *layout) if isinstance(layout, Packed) else (layout, None, None)


def layout_of(word: str, *most: Any) -> Any:
    """The layout of these words."""
    return Packed(*most) if word == "packed" else word


def seed_words(seed: Any) -> Tensor:
    """A number as a tensor in host memory: its lower 32 bits and the others. torch's own numbers end at 2**63."""
    if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
        seed = seed_number(seed)
    words = (seed % 2**32, seed // 2**32)
    return torch.stack([torch.full((), word, dtype=torch.int64, device="cpu") for word in words])


def _seed_of(seed: Tensor) -> Any:
    """The seed as a number, if it is seed_words' tensor; a caller's own tensor as it is."""
    if seed.numel() == 1:
        return seed
    low, high = seed.tolist()
    return low + high * 2**32


def unflatten(call: StaticCall, tensors: Any) -> tuple[Any, Any, Any, Options]:
    """-> q, k, v and the options with their tensors."""
    if len(tensors) == 3:
        return (*tensors, call.options)
    q, k, v, *arrays_given, offsets, seeds = tensors[: len(ARRAYS)]
    causal, window, q_offset, numbers, _, functions, layout, seed = call.options
    q_offset = q_offset if offsets is None else offsets
    seed = seed if seeds is None else _seed_of(seeds)
    functions = None if functions is None else (*functions, tuple(tensors[len(ARRAYS) :]))
    return q, k, v, Options(causal, window, q_offset, numbers, tuple(arrays_given), functions, layout, seed)


def forward_now(call: StaticCall, tensors: tuple[Any, ...]) -> Any:
    """Computes o and lse at once, where torch records nothing. Raises arrays.NeedsBridge where a tracer does record."""
    q, k, v, options = unflatten(call, tensors)
    return dispatch.run(Call((q, k, v, None), options, kernel=call.kernel, key=call.key))


def gradients_now(
    call: StaticCall, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> AttentionGradients:
    """Computes the gradients at once, for tensors for which torch records nothing now."""
    do = torch.zeros_like(o) if do is None else fetchable(do)
    q, k, v, options = unflatten(call, tensors)
    operands, kernel = (q, k, v, o, lse, do, dlse), kernel_of_backward(call.kernel)
    return gradients.run((operands, options, True, wanted, None, kernel))


def fetchable(do: Tensor) -> Tensor:
    """do with contiguous rows, as the kernels load them. sum().backward() gives one number broadcast to an array."""
    return do if do.stride(-1) == 1 else do.contiguous()


def all_gradients(
    call: StaticCall, wanted: tuple[str, ...], do: Any, dlse: Any, o: Any, lse: Any, tensors: Any
) -> list[Tensor]:
    """The gradients wanted, without None for the others."""
    found = gradients_now(call, wanted, do, dlse, o, lse, tensors)
    return [gradient for gradient in (*found[:-1], *(found.daux or ())) if gradient is not None]


@functools.cache
def wanted_of(needs: tuple[bool, ...]) -> tuple[str, ...]:
    """The names of gradients to compute. needs: booleans for q, k and v alone, or for ARRAYS followed by aux."""
    of_aux = [daux_name(number) for number, needed in enumerate(needs[len(ARRAYS) :]) if needed]
    of_arrays = [name for name, argument in GRADIENT_OF.items() if argument < len(needs) and needs[argument]]
    return (*of_arrays, *of_aux)


def no_tangents(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(recording.NO_TANGENTS)


def no_second_gradients(ctx: Any, *unused: Any) -> None:
    raise NotImplementedError(NO_SECOND_GRADIENTS)
