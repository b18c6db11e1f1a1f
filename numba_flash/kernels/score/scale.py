"""scale * product. All derivatives leave out this factor: the sums dQ and dK are multiplied by it once."""

from numba import cuda

from ..steps import elements
from ..steps.inlined import inlined
from ..steps.units import exponent_unit
from .stage import FragmentStage, Stage


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        return s * compute(score.scale)

    return Stage(value)


def on_fragments(config):
    unit = elements.COMPUTE_TYPES[config.dtype](exponent_unit(config))

    @inlined
    def value(s, factor, at, score):
        return s, factor * (score.scale * unit)

    @inlined
    def scaled_before(s, factor, at, score):
        return s, factor * unit

    return FragmentStage(scaled_before if config.has("score_mod") else value)  # it has taken the scaled product
