"""Terms of a row's sum that belong to no key: they add e^x to l and have no value.

TERMS (__init__.py) lists them, as STAGES lists the stages of a score. Each is a file whose `make(config)` returns x, a
device function of (b, h, arrays, strides), or None if the problem does not use it.

If P is rounded to 16 bits, the term is added last; otherwise the row's sum begins with it. As the first maximum, a term
far above all scores would push P into float16's smallest numbers.
"""

import functools
import math

from numba import cuda

from ..steps import elements
from ..steps.basics import inlined
from ..steps.units import exponent_unit
from . import TERMS


@functools.cache
def make(config):
    """-> x, or None. A problem has at most one term."""
    made = [x for term in TERMS if (x := term.make(config)) is not None]
    assert len(made) <= 1, "no kernel adds up two terms yet"
    return made[0] if made else None


def start(config):
    """-> start(b, h, arrays, strides), a device function: the maximum and the sum of a row before its first key, in
    natural units."""
    compute, x = elements.COMPUTE_TYPES[config.dtype], make(config)
    minus_inf, zero, one = compute(-math.inf), compute(0), compute(1)

    has_term = x is not None

    @cuda.jit(device=True)
    def before_keys(b, h, arrays, strides):
        if has_term:
            return x(b, h, arrays, strides), one
        return minus_inf, zero

    return before_keys


def on_fragments(config, rows):
    """-> load_terms, a device function, if there is a term."""
    group, unit = config.group_size, elements.COMPUTE_TYPES[config.dtype](exponent_unit(config))
    x = make(config)

    @inlined
    def load_terms(terms, b, h, lane_row, arrays, strides):
        """terms (rows,) <- the terms of a lane's rows, in the scores' unit, for a tile that begins with head
        h."""
        for r in range(rows):
            terms[r] = x(b, h + (lane_row + 8 * r) % group, arrays, strides) * unit

    return load_terms
