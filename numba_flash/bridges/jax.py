"""attention() as an operation of JAX: jit, grad, vmap.

`numba_flash.attention` comes here by itself for traced arrays. XLA calls back to Python where the operation stands and
hands over its own memory, in which the results are written: nothing is copied, and on a GPU work is enqueued on XLA's
stream. What is computed is what `attention` and `attention_backward` compute.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from .. import api, arrays, gradients, problem, select, select_backward
from ..api import AttentionOutput
from ..arrays import Layout

try:
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:
    raise NotImplementedError(
        f"attention inside jax.jit, jax.grad and jax.vmap needs jax.experimental.buffer_callback, which JAX "
        f"{jax.__version__} does not have; a newer JAX has it"
    ) from None

NOT_GIVEN = dict.fromkeys(("bias", "mask", "alibi_slopes", "seqlens_k", "q_offset", "dlse"))
GRADIENT_OF = dict(dq="q", dk="k", dv="v", dbias="bias", dalibi_slopes="alibi_slopes")


class Options(NamedTuple):
    """What is known when XLA compiles."""

    causal: bool
    window: tuple[int | None, int | None] | None
    q_offset: Any  # None also where it is an array
    scale: float | None
    softcap: float | None
    layout: str
    kernel: str


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
    """`numba_flash.attention` for traced JAX arrays: gradients of q, k, v, bias and alibi_slopes, also through lse.

    >>> jax.jit(jax.grad(lambda q: numba_flash.attention(q, k, v, causal=True).sum()))(q)

    The arguments and errors are those of `numba_flash.attention`, except that out and stream are refused: memory and
    stream are XLA's. What only running can tell, as whether `kernel` can compute it there, comes as a JaxRuntimeError
    that contains the error. vmap runs one problem after the other. Only reverse mode, and only once.
    """
    api.refuse_what_is_to_come(score_mod, mask_mod, aux, sinks, dropout_p, seed)
    for name, given in (("out", out), ("stream", stream)):
        if given is not None:
            raise NotImplementedError(f"{name} cannot be given where JAX traces: memory and stream are XLA's")
    offsets, q_offset = (q_offset, None) if arrays.is_array(q_offset) else (None, q_offset)
    operands = dict(
        q=q, k=k, v=v, bias=bias, mask=mask, alibi_slopes=alibi_slopes, seqlens_k=seqlens_k, q_offset=offsets
    )
    for name, array in operands.items():
        if not isinstance(array, jax.Array) and (array is not None or name in ("q", "k", "v")):
            raise TypeError(f"all arrays must be of one kind, but {name} is {type(array).__name__} beside JAX arrays")
    known = dict(causal=causal, window=window, q_offset=q_offset, scale=scale, softcap=softcap, return_lse=return_lse)
    for name, value in known.items():
        if any(isinstance(x, jax.core.Tracer) for x in (value if isinstance(value, tuple | list) else (value,))):
            raise TypeError(f"{name} must be known when JAX traces, not a traced value: see jax.jit's static_argnames")
    select.check_name(kernel)
    window = None if window is None else problem.window_sides(window)
    options = Options(causal, window, q_offset, scale, softcap, layout, kernel)
    o, lse = _attention(options, {name: array for name, array in operands.items() if array is not None})
    return AttentionOutput(o, lse) if return_lse else o


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, operands: dict[str, Any]) -> tuple[Any, Any]:
    def run(context: Any, results: Any, operands: dict[str, Any]) -> None:
        arguments, stream = _arguments(options, operands), _stream(context)
        with _subnormals():
            api.attention(**arguments, out=results, return_lse=True, stream=stream, kernel=options.kernel)

    checked = _checked(options, operands)
    o = jax.ShapeDtypeStruct(checked.o_shape, operands["q"].dtype)
    lse = jax.ShapeDtypeStruct(checked.lse_shape, checked.compute_dtype)
    return buffer_callback(run, (o, lse), vmap_method="sequential")(operands)


def _forward(options: Options, operands: dict[str, Any]) -> tuple[tuple[Any, Any], Any]:
    """What JAX differentiates comes marked; which gradients that asks for is kept as keys, which are not traced."""
    wanted = {name: () for name, of in GRADIENT_OF.items() if of in operands and operands[of].perturbed}
    values = {name: operand.value for name, operand in operands.items()}
    o, lse = _attention(options, values)
    return (o, lse), (wanted, values, o, lse)


def _backward(options: Options, kept: Any, cotangents: tuple[Any, Any]) -> tuple[dict[str, Any]]:
    wanted, operands, o, lse = kept
    do, dlse = cotangents
    names = tuple(name for name in GRADIENT_OF if name in wanted)
    given = dict(do=_dense(do), o=o, lse=lse)
    if not isinstance(dlse, jax.custom_derivatives.SymbolicZero):
        given["dlse"] = dlse

    def run(context: Any, results: dict[str, Any], given: dict[str, Any], operands: dict[str, Any]) -> None:
        stream = _stream(context)
        inputs, decision = gradients.understand(
            **{**NOT_GIVEN, **_arguments(options, operands), **given}, wanted=names, deterministic=True, stream=stream,
            kernel=options.kernel if options.kernel in select_backward.BUILT else "auto",
        )  # fmt: skip
        outputs = [arrays.read(name, results[name]) if name in names else None for name in GRADIENT_OF]
        with _subnormals():
            decision.launch.run([*inputs, *outputs], stream or 0)

    of = {name: operands[GRADIENT_OF[name]] for name in names}
    shapes = {name: jax.ShapeDtypeStruct(operand.shape, operand.dtype) for name, operand in of.items()}
    found = buffer_callback(run, shapes, vmap_method="sequential")(given, operands)
    names_of = {operand: name for name, operand in GRADIENT_OF.items()}
    return ({name: found.get(names_of.get(name)) for name in operands},)


def _dense(cotangent: Any) -> Any:
    zero = isinstance(cotangent, jax.custom_derivatives.SymbolicZero)
    return jax.numpy.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


def _arguments(options: Options, operands: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `attention` and `attention_backward`, all but kernel."""
    known = options._asdict()
    del known["kernel"]
    return {**known, **operands}


_floats = ctypes.CDLL(None if os.name == "posix" else "ucrtbase")
_USUAL = ctypes.create_string_buffer(64)  # no machine's floating-point environment is larger
_floats.fegetenv(_USUAL)


@contextlib.contextmanager
def _subnormals() -> Iterator[None]:
    """XLA has subnormal numbers flushed to zero, also while it calls back: all of float16 below 6e-5 would be lost."""
    flushing = ctypes.create_string_buffer(64)
    _floats.fegetenv(flushing)
    _floats.fesetenv(_USUAL)
    try:
        yield
    finally:
        _floats.fesetenv(flushing)


def _stream(context: Any) -> int | None:
    """XLA's stream on a GPU; in host memory there is none, and asking raises."""
    try:
        return context.stream
    except jax.errors.JaxRuntimeError:
        return None


def _checked(options: Options, operands: dict[str, Any]) -> problem.Problem:
    """The problem, from shapes and dtypes alone: a user's mistake shows where it was made, not when XLA runs."""

    def layout(array: Any) -> Layout:
        unit, strides = array.dtype.itemsize, problem.contiguous_strides(array.shape)
        return Layout("jax", None, array.shape, strides, unit, array.dtype.name, True)

    known = {name: layout(array) for name, array in operands.items()}
    return problem.Problem.of(
        known["q"], known["k"], known["v"], None, None, known.get("bias"), known.get("mask"), known.get("alibi_slopes"),
        known.get("seqlens_k"), known.get("q_offset"), options.q_offset, options.causal, options.window, options.scale,
        options.softcap, options.layout, return_lse=True,
    )  # fmt: skip
