"""scale * product. All derivatives leave out this factor: the sums dQ and dK are multiplied by it once."""

from numba import cuda

from ..steps import elements
from ..steps.basics import inlined
from ..steps.units import exponent_unit
from .stage import FragmentStage, Stage


def make(config):
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        return s * compute(score.scale)

    return Stage(value)


def on_fragments(config):
    unit, is_scaled = elements.COMPUTE_TYPES[config.dtype](exponent_unit(config)), config.has("score_mod")

    @inlined
    def value(s, factor, at, score):
        return s, factor * (unit if is_scaled else score.scale * unit)  # score_mod has taken the scaled product

    return FragmentStage(value)
