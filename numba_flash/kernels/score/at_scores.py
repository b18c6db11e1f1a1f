"""What reads.py loads for a fragment, for one score: rows that are computed again go key by key."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import float32, int64, uint32

from ..steps import elements
from ..steps.inlined import inlined
from .mask_bits import PIECE


class AtScores(NamedTuple):
    """Device functions of (b, h, query, key, arrays, strides)."""

    added: Callable[..., Any]  # -> the bias there, or 0
    visible: Callable[..., Any]  # -> whether the mask, of which there are the bits, shows the key


@functools.cache
def make(config: Any) -> AtScores:
    has_bias, has_mask = config.has("bias"), config.has("mask")
    load = elements.loader(config.dtype_of("bias") or "float32", float32)

    @inlined
    def added(b, h, query, key, arrays, strides):
        found = float32(0)
        if has_bias:
            row = b * strides.bias[0] + h * strides.bias[1] + query * strides.bias[2]
            found = load(arrays.bias, row + key * strides.bias[3])
        return found

    @inlined
    def visible(b, h, query, key, arrays, strides):
        found = True
        if has_mask:
            row = b * strides.mask_bits[0] + h * strides.mask_bits[1] + (query >> 4) * strides.mask_bits[2]
            word = row + (query & (PIECE - 1)) * strides.mask_bits[3] + (int64(key) >> 7) * 4 + ((key >> 1) & 3)
            bit = uint32(2 * ((key >> 3) & 15) + (key & 1))
            found = (arrays.mask_bits[word] >> bit) & uint32(1) != 0
        return found

    return AtScores(added, visible)
