"""attention() and attention_varlen() as an operation of JAX: jit, grad, vmap.

`numba_flash.attention` calls this module for traced arrays. XLA calls back to Python where the operation stands and
hands over its own memory, and the results are written there. Nothing is copied, and on a GPU the work is enqueued on
XLA's stream. dispatch/ does the computation, as for `attention` and `attention_backward`.

A callback is an object that equals every other one with the same options. JAX compiles each callback that it has not
seen, and caches it. A new function in each call would be compiled in each call.
"""

import ctypes
import functools
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np

from .. import arrays
from ..abi.parameters import aux_names
from ..arrays import Array, Layout
from ..dispatch import backward as gradients, caller_functions, forward as dispatch
from ..dispatch.call import Call, alignment_of
from ..dispatch.forward import AttentionOutput
from ..dispatch.launch import Launch
from ..dispatch.seed import with_seed
from ..problem.forward import LAYOUTS, Problem
from ..problem.memory import check_lengths
from ..problem.option_checks import window_sides
from ..problem.options import (
    ARRAY_NAMES,
    GRADIENT_OF,
    NUMBERS,
    OPTION_ARRAYS,
    GradientOperands,
    Operands,
    Options,
    daux_name,
)
from ..problem.strides import contiguous_strides
from ..select import rungs
from . import jax_seed, jax_sharding
from .jax_fold import fold
from .jax_refusals import FORWARD_MODE, no_second_derivative, reverse_only
from .jax_varying import axes_of, varying
from .static_call import StaticCall, kernel_of_backward

OPERANDS = ("q", "k", "v", *ARRAY_NAMES)  # the operation's possible operands
NO_ARRAYS = (None,) * len(OPTION_ARRAYS)


def run(call: Call) -> Any:
    """`dispatch.forward.run` for traced JAX arrays, with gradients of q, k, v and the options that have one,
    also through lse.

    >>> jax.jit(jax.grad(lambda q: numba_flash.attention(q, k, v, causal=True).sum()))(q)

    The arguments and errors are the same, except that out and stream are refused: memory and stream are XLA's. An
    error that only running can show, such as a `kernel` that cannot compute the problem there, comes as a
    JaxRuntimeError that contains it. vmap makes the mapped dimension part of the batch. Where an array with several
    batch entries is not mapped over, or with a seed or functions, one callback computes the problems one after the
    other. First derivatives in reverse mode work; forward mode, second derivatives, and vmap of packed sequences,
    which have no batch, raise NotImplementedError.

    seed may also be a JAX scalar, traced or not. The callback always reads it on the host: on a GPU the host waits for
    earlier work on XLA's stream.
    """
    (q, k, v, out), return_lse = call.operands, call.return_lse
    causal, window, q_offset, numbers, given_arrays, functions, layout, seed = call.options
    functions, aux = (None, ()) if functions is None else caller_functions.functions_of(functions)
    functions = functions and caller_functions.without_blocks(functions)
    for name, given in (("out", out), ("stream", call.stream)):
        if given is not None:
            raise NotImplementedError(
                f"{name} cannot be given where JAX traces or arrays are on several devices: memory and stream are XLA's"
            )
    offsets, q_offset = (q_offset, None) if arrays.is_array(q_offset) else (None, q_offset)
    operands = dict(zip(OPERANDS, (q, k, v, *(given_arrays or NO_ARRAYS), offsets), strict=True))
    operands |= dict(zip(aux_names(len(aux)), aux, strict=True))
    for name, array in operands.items():
        if isinstance(array, np.ndarray) and name not in ("q", "k", "v"):
            operands[name] = array = jax.numpy.asarray(array)
        if not isinstance(array, jax.Array) and (array is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(array).__name__} beside JAX arrays")
    static = dict(causal=causal, window=window, q_offset=q_offset, return_lse=return_lse)
    for name, value in (static | dict(zip(NUMBERS, numbers, strict=True))).items():
        if any(isinstance(x, jax.core.Tracer) for x in (value if isinstance(value, tuple | list) else (value,))):
            instead = (
                "head_dim ** -0.5 is a number where 1 / jnp.sqrt(head_dim) is traced; or multiply q by it and pass "
                "scale=1.0"
                if name == "scale"
                else "pass a Python number; of an argument of jax.jit, name it in static_argnames"
            )
            raise TypeError(f"{name} must be known when JAX traces, not a traced value: {instead}")
    rungs.check_name(call.kernel)
    window = None if window is None else window_sides(window)
    known = StaticCall(Options(causal, window, q_offset, numbers, None, functions, layout), call.kernel)
    operands = {name: array for name, array in operands.items() if array is not None}
    problem = _check(known, operands, return_lse)
    if seed is not None or problem.seeded:
        seed = jax_seed.operand_of(seed)
    if problem.seeded:
        operands[jax_seed.NAME] = seed
    axes = axes_of(operands.values())
    operands = {name: varying(array, axes) for name, array in operands.items()}
    for name in (*GRADIENT_OF.values(), *_gradients_of_aux(operands).values()):
        if name in operands:
            operands[name] = reverse_only(operands[name])
    try:
        try:
            o, lse = _attention(known, operands)
        except NotImplementedError as error:  # jax.shard_map without jax.jit has no symbolic_zeros
            if "shard_map" not in str(error):
                raise
            o, lse = jax.jit(_attention, static_argnums=0)(known, operands)
    except TypeError as error:  # jax.jit(jax.jacfwd) comes here: mapped tangents are refused by JAX when it traces
        if "forward-mode" not in str(error):
            raise
        raise NotImplementedError(FORWARD_MODE) from error
    return AttentionOutput(o, lse) if return_lse else o


def _check(known: StaticCall, operands: dict[str, Any], return_lse: Any) -> Problem:
    """Checks shapes and dtypes alone, so that a user's mistake raises where it was made, not when XLA runs."""

    def layout(array: Any) -> Layout:
        unit, strides = array.dtype.itemsize, contiguous_strides(array.shape)
        return Layout("jax", None, array.shape, strides, unit, array.dtype.name, True)

    layouts: dict[str, Any] = {name: layout(array) for name, array in operands.items()}
    options = known.plan_key((), _others(layouts)).options()
    return Problem.of(layouts["q"], layouts["k"], layouts["v"], options, return_lse=return_lse)


def _others(layouts: dict[str, Layout]) -> tuple[Layout | None, ...]:
    """The layouts of ARRAY_NAMES and of aux, in order."""
    return tuple(layouts.get(name) for name in (*ARRAY_NAMES, *_aux_of(layouts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(known: StaticCall, operands: dict[str, Any]) -> tuple[Any, Any]:
    operands = _in_order(operands)
    q, v = operands["q"], operands["v"]
    o = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
    axes = (1, 0) if known.packed else LAYOUTS[known.options.layout][:3]
    of_lse = tuple(q.shape[axis] for axis in axes)
    lse = jax.ShapeDtypeStruct(of_lse, jax.numpy.promote_types(q.dtype, jax.numpy.float32))
    return _call(_Forward(known, *_facts(dict(operands, o=o, lse=lse))), tuple(operands.values()), (o, lse))


def _forward(known: StaticCall, operands: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
    """Forward under jax.grad. JAX marks the operands to differentiate; `wanted` has their gradients' names as keys."""
    values = {name: operand.value for name, operand in operands.items()}
    of = GRADIENT_OF | _gradients_of_aux(values)
    wanted = {name: () for name, array in of.items() if array in operands and operands[array].perturbed}
    o, lse = _attention(known, values)
    return (o, lse), (wanted, values, o, lse)


def _backward(known: StaticCall, kept: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    wanted, operands, o, lse = kept
    do, dlse = cotangents
    given = dict(_in_order(operands), o=o, lse=lse, do=_dense(do))
    if not isinstance(dlse, jax.custom_derivatives.SymbolicZero):
        given["dlse"] = dlse
    array_of = GRADIENT_OF | _gradients_of_aux(operands)
    of = {name: operands[array] for name, array in array_of.items() if name in wanted}
    results = {name: jax.ShapeDtypeStruct(operand.shape, operand.dtype) for name, operand in of.items()}
    callback = _Backward(known, *_facts(given | results))
    found = _call(callback, tuple(given.values()), tuple(results.values()))
    gradients_of = {
        array_of[name]: jax_sharding.lying_as(of[name], gradient) for name, gradient in zip(results, found, strict=True)
    }
    return ({name: gradients_of.get(name) for name in operands},)


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _dense(cotangent: Any) -> Any:
    zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jax.numpy.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
def _call(callback: "_Callback", given: tuple[Any, ...], results: tuple[jax.ShapeDtypeStruct, ...]) -> Any:
    axes = axes_of(given)
    return tuple(varying(x, axes) for x in jax_sharding.call(callback, results, *given))


@_call.defjvp
def _(callback: Any, results: Any, primals: Any, tangents: Any) -> Any:
    found = _call(callback, *primals, results)
    return found, no_second_derivative(tangents, found)


def _in_order(operands: dict[str, Any]) -> dict[str, Any]:
    """The operands in the order of OPERANDS, q first; JAX passes dictionaries in alphabetical order."""
    return {name: operands[name] for name in (*OPERANDS, jax_seed.NAME, *_aux_of(operands)) if name in operands}


def _gradients_of_aux(operands: dict[str, Any]) -> dict[str, str]:
    """{name of a possible gradient of aux: name of its array}"""
    names = enumerate(_aux_of(operands))
    return {
        daux_name(number): name
        for number, name in names
        if jax.numpy.issubdtype(operands[name].dtype, jax.numpy.floating)
    }


def _aux_of(names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that stand for arrays read by functions, in order."""
    return aux_names(sum(name.startswith("aux") for name in names))


def _facts(named: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(named), tuple(x.dtype.name for x in named.values())


class _Plan(NamedTuple):
    """A prepared launch for buffers of given shapes."""

    forward: Problem
    launch: Launch
    where: tuple[int | None, ...]  # for each operand of the kernel the index of its buffer; None = there is none
    seed: int | None  # the index of the seed's buffer
    layouts: tuple[Layout, ...]  # layouts of the buffers for one problem
    turns: tuple[tuple[int, ...], ...]  # turns[problem][buffer]: where the problem begins in the buffer, in bytes


@dataclass(frozen=True)
class _Callback:
    """The function that XLA calls. Equal callbacks are compiled once."""

    known: StaticCall
    names: tuple[str, ...]  # names of the operands, then of the results
    dtypes: tuple[str, ...]
    order: ClassVar[tuple[str, ...]]  # names of the launch's operands, in the launch's order

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.known, self.names, self.dtypes)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]  # asked for in every call

    def __call__(self, context: Any, results: Sequence[Any], *operands: Any) -> None:
        buffers = (*operands, *results)
        addresses, device = arrays.jax_addresses(buffers)
        alignment = alignment_of(functools.reduce(operator.or_, addresses))
        plan = _plan(self, tuple([x.shape for x in buffers]), device, alignment)
        stream = 0 if device is None else context.stream  # on the host there is no stream, and reading it raises
        seeds: list[Any] = [None] * len(plan.turns)
        if (at := plan.seed) is not None:
            begins = [starts[at] for starts in plan.turns]
            seeds = jax_seed.read(addresses[at], buffers[at].shape, plan.layouts[at], begins, stream)
        for starts, seed in zip(plan.turns, seeds, strict=True):
            given = [
                None if n is None else Array(addresses[n] + starts[n], plan.layouts[n], buffers[n]) for n in plan.where
            ]
            check_lengths(dict(zip(Operands._fields, given, strict=False)), plan.forward)
            if seed is not None:
                given = with_seed(given, len(self.order), plan.forward, seed)
            _run(plan.launch, given, stream)


class _Forward(_Callback):
    order, results = Operands._fields, ("o", "lse")

    def plan(self, layouts: dict[str, Layout], **asked: Any) -> tuple[Problem, Launch]:
        operands = tuple(layouts.get(name) for name in ("q", "k", "v", "o", "lse"))
        found = dispatch.plan(self.known.plan_key(operands, _others(layouts), **asked))
        if found.choice.copies:
            raise NotImplementedError(
                f"kernel={found.choice.kernel!r} runs on a GPU, and these JAX arrays are in host memory. Nothing is "
                "copied where JAX traces: put the arrays on the GPU, or leave kernel out"
            )
        return found.problem, found.launch


class _Backward(_Callback):
    order, results = GradientOperands._fields, tuple(GRADIENT_OF)

    def plan(self, layouts: dict[str, Layout], **asked: Any) -> tuple[Problem, Launch]:
        known = self.known._replace(kernel=kernel_of_backward(self.known.kernel))
        operands = tuple(layouts.get(name) for name in ("q", "k", "v", "o", "lse", "do", "dlse"))
        wanted = tuple(name for name in layouts if name in GRADIENT_OF or name.startswith("daux"))
        found = gradients.plan(known.plan_key(operands, _others(layouts), wanted=wanted, **asked))
        return found.problem.forward, found.launch


@functools.lru_cache(maxsize=4096)
def _plan(callback: Any, shapes: tuple[tuple[int, ...], ...], device: int | None, alignment: int) -> _Plan:
    names, dtypes = callback.names, callback.dtypes
    aux = _aux_of(names)
    of_aux = [daux_name(number) for number in range(len(aux))] if any(name.startswith("daux") for name in names) else []
    seed = names.index(jax_seed.NAME) if jax_seed.NAME in names else None
    # alone: mapped dimensions must not become part of the batch
    folded = fold(names, shapes, callback.known.mapped(shapes[0]), alone=callback.known.reads_entries(seed))
    layouts = tuple(
        arrays.jax_layout(
            device, shape, strides, dtype, readonly=name not in callback.results and not name.startswith("daux")
        )
        for name, shape, strides, dtype in zip(names, folded.shapes, folded.strides, dtypes, strict=True)
    )
    sizes = [arrays.ITEM_SIZE[dtype] for dtype in dtypes]
    turns = tuple(tuple(map(operator.mul, starts, sizes)) for starts in folded.starts)
    fetched = [n for n, name in enumerate(names) if name in ("q", "k", "v", "o", "do")]
    of_bias = [n for n, name in enumerate(names) if name == "bias"]
    bias_aligned = alignment == 16 and all(starts[n] % 16 == 0 for starts in turns for n in of_bias)
    begins = [starts[n] for starts in turns for n in fetched]
    alignment = alignment_of(functools.reduce(operator.or_, begins, alignment))
    named = dict(zip(names, layouts, strict=True))
    asked = dict(has_stream=device is not None, alignment=alignment, bias_aligned=bias_aligned)
    forward, launch = callback.plan(named, **asked)
    where = tuple(names.index(name) if name in names else None for name in (*callback.order, *aux, *of_aux))
    return _Plan(forward, launch, where, seed, layouts, turns)


# Calls of a microsecond; CDLL would let other threads run Python meanwhile, and then wait for its turn.
_floats = ctypes.PyDLL(None if os.name == "posix" else "ucrtbase")
_Environment = ctypes.c_char * 64  # no machine's floating-point environment is larger
_USUAL = _Environment()
_floats.fegetenv(_USUAL)


def _run(launch: Launch, operands: Sequence[Array | None], stream: int) -> None:
    """Runs with subnormal numbers. XLA flushes them to zero, also in callbacks: float16 below 6e-5 would be lost."""
    flushing = _Environment()
    _floats.fegetenv(flushing)
    _floats.fesetenv(_USUAL)
    try:
        launch.run(operands, stream)
    finally:
        _floats.fesetenv(flushing)
