"""A seed where JAX traces: an operand, so that another seed compiles nothing.

An integer becomes its two words of 32 bits, because JAX has 64 bits only if enabled. A JAX scalar stays as it is.
Kernels take a seed by value, so the callback reads it on the host. On a GPU the host then waits for earlier work on
XLA's stream, once for all problems of a callback.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .. import arrays
from ..arrays import Layout
from ..dispatch.seed import OF_A_KEY, seed_number
from ..machine import context

NAME = "seed"
DTYPES = ("int32", "uint32", "int64", "uint64")


def operand_of(seed: Any) -> jax.Array:
    """The seed as an array for the operation. A bad number raises here, a bad array element when the operation runs."""
    if not isinstance(seed, jax.Array):
        return jax.numpy.asarray(np.array([seed_number(seed)], np.uint64).view(np.uint32))
    if seed.shape or str(seed.dtype) not in DTYPES:
        raise TypeError(
            f"seed must be a whole number, or a JAX scalar of {', '.join(DTYPES)}, not {seed.dtype} of shape "
            f"{seed.shape}; {OF_A_KEY}"
        )
    return seed


def read(
    address: int, shape: tuple[int, ...], layout: Layout, starts: Sequence[int], stream: int
) -> list[np.integer[Any]]:
    """The seeds that begin at bytes `starts` of a buffer of this shape. layout: the layout of one seed."""
    found = np.empty(math.prod(shape) // math.prod(layout.shape), "uint64" if layout.shape else layout.dtype)
    if layout.device is None:
        ctypes.memmove(found.ctypes.data, address, found.nbytes)
    else:
        context.ensure(layout.device)
        arrays.move(found.ctypes.data, address, found.nbytes, arrays.core_stream(stream))
    return [found[start // found.itemsize] for start in starts]
