"""A sink: one more score of every row of a head, e^sink more in its sum, without a value (Xiao et al., 2023).

It is the last step of a row where P is rounded to 16 bits, and its start where P is not: a sink far above all scores,
taken as the first maximum, would leave P to float16's smallest numbers.
"""

import math

from numba import cuda

from ..steps import elements
from ..steps.inlined import inlined
from .stage import exponent_unit


def make(config):
    """-> start(b, h, arrays, strides): the maximum and the sum of a row before its first key, natural, a device
    function."""
    has_sinks = config.has("sinks")
    compute = elements.COMPUTE_TYPES[config.dtype]
    load = elements.loader(config.dtype_of("sinks") or "float32", compute)
    minus_inf, zero, one = compute(-math.inf), compute(0), compute(1)

    @cuda.jit(device=True)
    def start(b, h, arrays, strides):
        if has_sinks:
            return load(arrays.sinks, b * strides.sinks[0] + h * strides.sinks[1]), one
        return minus_inf, zero

    return start


def on_fragments(config, rows):
    """-> load_sinks, a device function."""
    group = config.group_size
    real = elements.COMPUTE_TYPES[config.dtype]
    load, unit = elements.loader(config.dtype_of("sinks") or "float32", real), real(exponent_unit(config))

    @inlined
    def load_sinks(sinks, b, h, lane_row, arrays, strides):
        """sinks (rows,) <- those of a lane's rows in the units of its scores, of a tile that begins with head h."""
        for r in range(rows):
            head = h + (lane_row + 8 * r) % group
            sinks[r] = load(arrays.sinks, b * strides.sinks[0] + head * strides.sinks[1]) * unit

    return load_sinks
