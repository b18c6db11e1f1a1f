"""The derivatives that attention does not have in JAX, each refused where it would be computed.

JAX makes tangents also where nobody computes them: reverse mode begins with the tangents and transposes them, and
jax.lax.stop_gradient drops them later. So a tangent is a primitive that can stand in a program and cannot run.
"""

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
SECOND = f"the second derivative of attention (jax.grad of jax.grad, jax.hessian) is not there: {INSTEAD}"


def _primitive(name: str, words: str) -> Primitive:
    """One whose evaluation is an error. Its results have the shapes in its parameter `like`."""
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


@jax.custom_jvp
def reverse_only(x: Any) -> Any:
    """x itself; its tangent can be transposed, and not computed."""
    return x


@reverse_only.defjvp
def _(primals: Any, tangents: Any) -> Any:
    (x,), (tangent,) = primals, tangents
    # x may have a tangent of its own, as in jax.hessian, whose tangents are around those of a gradient
    return reverse_only(x), _in_reverse_only.bind(tangent, like=(jax.typeof(tangent),))[0]


def no_second_derivative(tangents: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """The tangents of gradients."""
    return tuple(
        _second.bind(*jax.tree.leaves(tangents), like=tuple(jax.core.ShapedArray(x.shape, x.dtype) for x in results))
    )
