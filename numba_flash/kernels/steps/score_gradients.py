"""From a bare product q . k to its weight p, now that the row's lse is known, and what a softcap lets through."""

from numba import float32

from ...ptx import approx
from .fragment_scores import tanh
from .inlined import inlined


def make(config, one):
    """-> (weight, through_softcap), device functions. one: of steps/fragment_scores."""
    ex2 = approx.ex2

    @inlined
    def weight(product, slope, distance, scale, softcap, lse_log2):
        """p = 2^(score - lse), both in units of log2(e); lse_log2 is +inf for a row that sees no key."""
        return ex2(one(product, slope, distance, scale, softcap) - lse_log2)

    @inlined
    def through_softcap(product, scale, softcap):
        """The derivative of softcap * tanh(scale * product / softcap), without the factor scale."""
        t = tanh(product * (scale / softcap))
        return float32(1) - t * t

    return weight, through_softcap
