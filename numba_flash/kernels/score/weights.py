"""P of one position, recomputed from the row's log-sum-exp: a backward stores no scores (Dao et al., 2022, section
3.1).

A weight has the same factor in dV as in the output (kept_weights.py), and so has its dP.
"""

import functools
import math

from numba import cuda

from ..steps import elements
from . import make as make_score


@functools.cache
def make(config):
    """weight(product, row_lse, at, needs_mask, arrays, strides, score) -> (p, derivative of the score by scale *
    product). needs_mask: as in Score."""
    compute = elements.COMPUTE_TYPES[config.dtype]
    minus_inf = compute(-math.inf)
    made = make_score(config)

    @cuda.jit(device=True)
    def weight(product, row_lse, at, needs_mask, arrays, strides, score):
        """If a mask removes the key or the row sees none (lse -inf), p is 0 and is not computed."""
        p, derivative = compute(0), compute(1)
        if row_lse != minus_inf and made.visible(at, needs_mask, arrays, strides):
            s, derivative = made.with_derivative(product, at, arrays, strides, score)
            if s != minus_inf:
                exponent = s - row_lse
                p = math.exp(compute(0) if exponent > compute(0) else exponent)  # above 0 is the rounding of lse
        return p, derivative

    return weight
