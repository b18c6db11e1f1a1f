"""s + bias[b, h, q_index, k_index]."""

from numba import cuda

from ..steps import elements
from ..steps.basics import inlined
from .stage import FragmentStage, Stage


def make(config):
    if not config.has("bias"):
        return None
    load = elements.loader(config.dtype_of("bias"), elements.COMPUTE_TYPES[config.dtype])

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        row = at.b * strides.bias[0] + at.h * strides.bias[1] + at.q_index * strides.bias[2]
        return s + load(arrays.bias, row + at.k_index * strides.bias[3])

    return Stage(value)


def on_fragments(config):
    """Adds what reads.py has loaded before the products were ready."""
    if not config.has("bias"):
        return None
    one = elements.COMPUTE_TYPES[config.dtype](1)

    @inlined
    def value(s, factor, at, score):
        return s * factor + at.added, one

    return FragmentStage(value)
