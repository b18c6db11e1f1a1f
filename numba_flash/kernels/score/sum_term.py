"""The term that an option adds to the sum of every row. A sink is one more score of each row of a head: it adds
e^sink and has no value (Xiao et al., 2023).

If P is rounded to 16 bits, the term is added last; otherwise the row's sum begins with it. As the first maximum, a term
far above all scores would push P into float16's smallest numbers.
"""

import functools
import math

from numba import cuda

from ..steps import elements, lse_delta
from ..steps.basics import inlined
from ..steps.sequence import lse_row
from ..steps.units import exponent_unit


@functools.cache
def make(config):
    """-> sink(b, h, arrays, strides), in natural units; None if the problem has none."""
    if not config.has("sinks"):
        return None
    load = elements.loader(config.dtype_of("sinks"), elements.COMPUTE_TYPES[config.dtype])

    @inlined
    def sink(b, h, arrays, strides):
        return load(arrays.sinks, b * strides.sinks[0] + h * strides.sinks[1])

    return sink


def start(config):
    """-> start(b, h, arrays, strides), a device function: the maximum and the sum of a row before its first key, in
    natural units."""
    compute, sink = elements.COMPUTE_TYPES[config.dtype], make(config)
    minus_inf, zero, one, has_sink = compute(-math.inf), compute(0), compute(1), sink is not None

    @cuda.jit(device=True)
    def before_keys(b, h, arrays, strides):
        if has_sink:
            return sink(b, h, arrays, strides), one
        return minus_inf, zero

    return before_keys


def on_fragments(config, rows):
    """-> load_sinks, a device function, if there are sinks."""
    group, unit = config.group_size, elements.COMPUTE_TYPES[config.dtype](exponent_unit(config))
    sink = make(config)

    @inlined
    def load_sinks(sinks, b, h, lane_row, arrays, strides):
        """sinks (rows,) <- those of a lane's rows, in the scores' unit, for a tile that begins with head h."""
        for r in range(rows):
            sinks[r] = sink(b, h + (lane_row + 8 * r) % group, arrays, strides) * unit

    return load_sinks


def row_gradient(config):
    """dsink = the sum over the head's rows of -e^(sink - lse) * delta,    delta = rowsum(dO * O) - dlse.

    A sink is the score of a key whose value is 0: its weight in a row is e^(sink - lse), and its dP is 0, so dS = P *
    (dP - delta) gives this formula. The rest of a backward does not know of sinks: they are in lse.
    """
    compute, of_blocks, minus_delta_at = elements.COMPUTE_TYPES[config.dtype], config.of_blocks, lse_delta.MINUS_DELTA
    load, minus_inf = elements.loader(config.given, compute), compute(-math.inf)

    @cuda.jit(device=True)
    def of_row(sequence, h, q_index, arrays, strides, sizes):
        at = lse_row(sequence, h, q_index, sizes)
        lse, weight = arrays.lse[at], compute(0)
        if lse != minus_inf:  # otherwise neither the row nor its sink has a weight
            exponent = load(arrays.sinks, sequence.b * strides.sinks[0] + h * strides.sinks[1]) - lse
            weight = math.exp(compute(0) if exponent > compute(0) else exponent)  # above 0 is the rounding of lse
        if weight != 0:
            if of_blocks:
                return -weight * -arrays.lse_delta[lse_delta.block_row(sequence, h, q_index, sizes) + minus_delta_at]
            return -weight * arrays.delta[at]
        return compute(0)

    return of_row
