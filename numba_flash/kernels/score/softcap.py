"""softcap * tanh(s / softcap): scores stay between -softcap and softcap (Gemma 2, 2024)."""

import math

from numba import cuda, float32

from ...functions.quick import SMALL
from ...ptx import approx
from ..steps import elements
from ..steps.basics import inlined
from ..steps.units import LOG2_E, exponent_unit
from .stage import FragmentStage, Stage


def make(config):
    if not config.has("softcap"):
        return None
    compute = elements.COMPUTE_TYPES[config.dtype]

    @cuda.jit(device=True)
    def value(s, at, arrays, strides, score):
        return compute(score.softcap) * math.tanh(s / compute(score.softcap))

    @cuda.jit(device=True)
    def with_derivative(s, at, arrays, strides, score):
        t = math.tanh(s / compute(score.softcap))
        return compute(score.softcap) * t, compute(1) - t * t

    return Stage(value, with_derivative)


@inlined
def exact_tanh(x):
    return math.tanh(x)


@inlined
def quick_tanh(x):
    """Like quick.tanh, which callers' functions get, for Numba's numbers."""
    square = x * x
    odd = x + x * square * (float32(-1 / 3) + square * (float32(2 / 15) + square * float32(-17 / 315)))
    large = float32(1) - float32(2) * approx.rcp(float32(1) + approx.ex2(x * float32(2 * LOG2_E)))
    return odd if abs(x) < float32(SMALL) else large


def on_fragments(config):
    if not config.has("softcap"):
        return None
    real = elements.COMPUTE_TYPES[config.dtype]
    unit = real(exponent_unit(config))
    tanh = exact_tanh if config.dtype in ("float32", "float64") else quick_tanh

    @inlined
    def value(s, factor, at, score):
        cap = score.softcap * unit
        return tanh(s * (factor / cap)), cap

    @inlined
    def derivative(t):
        return real(1) - t * t

    return FragmentStage(value, derivative)
