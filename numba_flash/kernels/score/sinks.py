"""A sink: one more score of every row of a head. It adds e^sink to the row's sum and has no value (Xiao et al.,
2023)."""

import math

from numba import cuda

from ..steps import elements, lse_delta
from ..steps.basics import inlined
from ..steps.sequence import lse_row
from .stage import HeadGradient


def make(config):
    """-> sink(b, h, arrays, strides), in natural units; None if the problem has none."""
    if not config.has("sinks"):
        return None
    load = elements.loader(config.dtype_of("sinks"), elements.COMPUTE_TYPES[config.dtype])

    @inlined
    def sink(b, h, arrays, strides):
        return load(arrays.sinks, b * strides.sinks[0] + h * strides.sinks[1])

    return sink


def head_gradient(config):
    """dsink = the sum over the head's rows of -e^(sink - lse) * delta,    delta = rowsum(dO * O) - dlse.

    A sink is the score of a key whose value is 0: its weight in a row is e^(sink - lse), and its dP is 0, so dS = P *
    (dP - delta) gives this formula. The rest of a backward does not know of sinks: they are in lse.
    """
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store_element = elements.loader(config.given, compute), elements.storer(config.given)
    delta_of, minus_inf = lse_delta.delta_of_row(config), compute(-math.inf)

    @cuda.jit(device=True)
    def of_row(sequence, h, q_index, arrays, strides, sizes):
        lse = arrays.lse[lse_row(sequence, h, q_index, sizes)]
        weight = compute(0)
        if lse != minus_inf:  # otherwise neither the row nor its sink has a weight
            exponent = load(arrays.sinks, sequence.b * strides.sinks[0] + h * strides.sinks[1]) - lse
            weight = math.exp(compute(0) if exponent > compute(0) else exponent)  # above 0 is the rounding of lse
        if weight != 0:
            return -weight * delta_of(sequence, h, q_index, arrays, sizes)
        return compute(0)

    @cuda.jit(device=True)
    def store(total, b, h, arrays, strides):
        store_element(arrays.dsinks, b * strides.dsinks[0] + h * strides.dsinks[1], total)

    return HeadGradient(of_row, store)
