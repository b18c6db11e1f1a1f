"""P of one position again, from the row's log-sum-exp: the backward keeps no scores (the seeds' recomputation)."""

import math

from numba import cuda

from . import elements, scores


def make(config):
    """-> (head, weight), both device functions; head is that of steps.scores."""
    compute = elements.COMPUTE_TYPES[config.dtype]
    has_softcap = config.softcap
    minus_inf = compute(-math.inf)
    head, capped, added = scores.parts(config)

    @cuda.jit(device=True)
    def weight(
        product, row_lse, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes,
        bias_strides, mask_strides, alibi_strides, scale, softcap,
    ):  # fmt: skip
        """-> (p, what the softcap lets through: the derivative of its tanh, or 1).

        p is 0, and not computed, where the mask removes the key or the row sees none (lse -inf).
        """
        s = capped(product, scale, softcap)
        through = compute(1)
        if has_softcap:
            through -= (s / compute(softcap)) * (s / compute(softcap))
        s = added(s, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes, bias_strides, mask_strides, alibi_strides)
        p = compute(0)
        if s != minus_inf and row_lse != minus_inf:
            p = math.exp(s - row_lse)
        return p, through

    return head, weight
