"""From a bare product q . k to a finished score: scale, softcap, ALiBi, bias, mask, in this order.

Also `head`, what a block needs to know of its batch entry before the first key. Features that a
problem does not use are closure constants that are False, and leave no code behind.
"""

import math

from numba import cuda, int64

from . import elements


def make(config):
    """-> (head, finish_score), both device functions."""
    head, capped, added = parts(config)

    @cuda.jit(device=True)
    def finish_score(
        product, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes,
        bias_strides, mask_strides, alibi_strides, scale, softcap,
    ):  # fmt: skip
        """The score of (q_index, k_index), natural; -inf where the mask removes it."""
        s = capped(product, scale, softcap)
        return added(
            s, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes, bias_strides, mask_strides, alibi_strides
        )

    return head, finish_score


def parts(config):
    """-> (head, capped, added), device functions: finish_score in two steps, for whoever needs what lies between."""
    compute = elements.COMPUTE_TYPES[config.dtype]
    has_softcap, has_mask = config.softcap, config.mask
    has_bias, has_alibi = config.bias_dtype is not None, config.alibi_dtype is not None
    has_seqlens_k = config.seqlens_k
    offset_from_seqlens_k = config.q_offset_source == "seqlens_k"
    offset_from_array = config.q_offset_source == "array"
    load_bias = elements.loader(config.bias_dtype or "float32", compute)
    load_slope = elements.loader(config.alibi_dtype or "float32", compute)
    minus_inf = compute(-math.inf)

    @cuda.jit(device=True)
    def head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset):
        """-> (the number of valid keys of batch entry b, the position of its query 0)."""
        keys = seqlen_k
        if has_seqlens_k:
            # Clamped: the lengths lie on the device, where the host cannot check them without waiting.
            keys = min(max(int64(seqlens_k[b * batch_strides[0]]), 0), seqlen_k)
        if offset_from_seqlens_k:
            q_offset = q_offset + keys
        if offset_from_array:
            q_offset = q_offset + int64(q_offsets[b * batch_strides[1]])
        return keys, q_offset

    @cuda.jit(device=True)
    def capped(product, scale, softcap):
        """What scale and softcap make of a product; with softcap between -softcap and softcap."""
        s = product * compute(scale)
        if has_softcap:
            s = compute(softcap) * math.tanh(s / compute(softcap))
        return s

    @cuda.jit(device=True)
    def added(
        s, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes, bias_strides, mask_strides, alibi_strides
    ):  # fmt: skip
        """s with what depends on the position alone; -inf where the mask removes it."""
        if has_mask:
            at = b * mask_strides[0] + h * mask_strides[1]
            if mask[at + q_index * mask_strides[2] + k_index * mask_strides[3]] == 0:
                return minus_inf
        if has_alibi:
            slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
            s -= slope * compute(abs(q_pos - k_index))
        if has_bias:
            at = b * bias_strides[0] + h * bias_strides[1]
            s += load_bias(bias, at + q_index * bias_strides[2] + k_index * bias_strides[3])
        return s

    return head, capped, added
