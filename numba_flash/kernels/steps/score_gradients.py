"""From a bare product q . k to its weight p, now that the row's lse is known, and what a softcap lets through."""

import math

from numba import float32

from ...ptx import approx
from .fragment_scores import tanh
from .inlined import inlined


def make(config, one):
    """-> (weight, sure_weight, through_softcap), device functions. one: of steps/fragment_scores."""
    ex2, minus_inf = approx.ex2, float32(-math.inf)

    @inlined
    def weight(product, slope, distance, scale, softcap, lse_log2):
        """p = 2^(score - lse), both in units of log2(e); lse_log2 is +inf for a row that sees no key."""
        return ex2(one(product, slope, distance, scale, softcap) - lse_log2)

    @inlined
    def sure_weight(product, slope, distance, scale, softcap, lse_log2):
        """The same, and 0 for a score of -inf beside an lse that is NaN, too."""
        score = one(product, slope, distance, scale, softcap)
        return ex2(score - lse_log2) if score != minus_inf else float32(0)

    @inlined
    def through_softcap(product, scale, softcap):
        """The derivative of softcap * tanh(scale * product / softcap), without the factor scale."""
        t = tanh(product * (scale / softcap))
        return float32(1) - t * t

    return weight, sure_weight, through_softcap
