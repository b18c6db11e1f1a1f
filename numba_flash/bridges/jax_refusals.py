"""The derivatives that attention does not have in JAX, each refused where it would be computed.

JAX makes tangents also where nobody computes them: reverse mode begins with the tangents and transposes them, and
jax.lax.stop_gradient drops them later. So a tangent is a primitive that can stand in a program and cannot run.
"""

import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

INSTEAD = (
    "attention has gradients by reverse mode, once: jax.grad, jax.vjp and jax.jacrev. For other derivatives use "
    "jax.nn.dot_product_attention"
)
FORWARD_MODE = (
    f"forward mode (jax.jvp, jax.jacfwd, jax.linearize, and the outer half of jax.hessian) of attention is not there: "
    f"{INSTEAD}"
)
TAYLOR_MODE = f"Taylor mode (jax.experimental.jet) of attention is not there: {INSTEAD}"
EXPORT = (
    "attention is computed by a callback into this process, which jax.export cannot write down: export the program "
    "with jax.nn.dot_product_attention in its place"
)
SECOND = f"the second derivative of attention (jax.grad of jax.grad, jax.hessian) is not there: {INSTEAD}"


def _primitive(name: str, words: str) -> Primitive:
    """A primitive whose evaluation is an error. Its results have the shapes in its parameter `like`."""
    primitive = Primitive(name)
    primitive.multiple_results = True

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(words)

    def batched(tangents: Any, axes: Any, *, like: Any) -> Any:
        size = next(x.shape[axis] for x, axis in zip(tangents, axes, strict=True) if axis is not None)
        tangents = [
            jax.numpy.broadcast_to(x, (size, *x.shape)) if axis is None else jax.numpy.moveaxis(x, axis, 0)
            for x, axis in zip(tangents, axes, strict=True)
        ]
        like = tuple(x.update(shape=(size, *x.shape)) for x in like)
        return primitive.bind(*tangents, like=like), (0,) * len(like)

    primitive.def_impl(refuse)
    primitive.def_abstract_eval(lambda *tangents, like: like)
    mlir.register_lowering(primitive, refuse)
    batching.primitive_batchers[primitive] = batched
    ad.deflinear2(primitive, refuse)
    return primitive


_in_reverse_only = _primitive("numba_flash_in_reverse_only", FORWARD_MODE)
ad.primitive_transposes[_in_reverse_only] = lambda cotangents, *_, like: cotangents
_second = _primitive("numba_flash_second_derivative", SECOND)


def _refuse_export(context: Any, x: Any) -> Any:
    if context.module_context.lowering_parameters.for_export:
        raise NotImplementedError(EXPORT)
    return [x]


def _tangents(primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    if type(tangent) is ad.Zero:
        return reverse_only(x), tangent
    # x may have a tangent of its own, as in jax.hessian, whose tangents are around those of a gradient
    return reverse_only(x), _in_reverse_only.bind(tangent, like=(jax.typeof(tangent),))[0]


# Not a jax.custom_jvp: jet looks past it, and past a custom_vjp.
_operand = Primitive("numba_flash_operand")
_operand.def_impl(lambda x: x)
_operand.def_abstract_eval(lambda x: x)
mlir.register_lowering(_operand, _refuse_export)
batching.primitive_batchers[_operand] = lambda operands, axes: (_operand.bind(*operands), *axes)
ad.primitive_jvps[_operand] = _tangents


def reverse_only(x: Any) -> Any:
    """x itself; its tangent can be transposed, but not computed."""
    _refuse_jet()
    return _operand.bind(x)


@functools.cache
def _refuse_jet() -> None:
    """Registers the refusal. jax.experimental.jet is imported by nothing else."""
    try:
        from jax.experimental.jet import jet_rules
    except ImportError:  # a JAX without it
        return

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(TAYLOR_MODE)

    jet_rules[_operand] = refuse


def no_second_derivative(tangents: Any, gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tangents of gradients."""
    return tuple(_second.bind(*jax.tree.leaves(tangents), like=tuple(jax.typeof(x) for x in gradients)))
