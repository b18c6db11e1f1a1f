"""scale * product. Its factor is left out of every derivative: the sums dQ and dK are multiplied by it once."""

from typing import Any

from numba import cuda

from ..steps import elements
from ..steps.inlined import inlined
from .stage import LOG2_E, FragmentStage, Stage


def make(config: Any) -> Stage:
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        return s * compute(score.scale)

    return Stage(value)


def on_fragments(config: Any) -> FragmentStage:
    log2_e = elements.COMPUTE_TYPES[config.dtype](LOG2_E)

    @inlined
    def value(s, factor, term, distance, score):
        return s, factor * (score.scale * log2_e)

    return FragmentStage(value)
