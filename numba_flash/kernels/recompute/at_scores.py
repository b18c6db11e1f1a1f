"""What reads.py loads for a fragment, loaded for one score: rows that are computed again need it key by key."""

import functools

from numba import int64, uint32

from ..score.mask_bits import ENDS, PIECE
from ..score.reads import bits_finder
from ..steps import elements
from ..steps.basics import inlined, named


@functools.cache
def make(config, of_keys=False):
    """-> device functions: `added`, the bias or 0, and `visible`, whether the mask leaves the key, by its bits.
    of_keys: the mask's bits have keys as rows."""
    has_bias, has_bits = config.has("bias"), config.mask_bits
    bits_of, real = bits_finder(of_keys), elements.COMPUTE_TYPES[config.dtype]
    load = elements.loader(config.dtype_of("bias") or "float32", real)

    @inlined
    def added(b, h, query, key, arrays, strides):
        found = real(0)
        if has_bias:
            row = b * strides.bias[0] + h * strides.bias[1] + query * strides.bias[2]
            found = load(arrays.bias, row + key * strides.bias[3])
        return found

    @inlined
    def visible(b, h, query, key, arrays, strides):
        found = True
        if has_bits:
            bits, by = bits_of(arrays, strides)
            row, column = (key, query) if of_keys else (query, key)
            first = b * by[0] + h * by[1] + (row >> 4) * by[2] + ENDS + (row & (PIECE - 1)) * by[3]
            word = bits[first + (int64(column) >> 7) * 4 + ((column >> 1) & 3)]
            found = (word >> uint32(2 * ((column >> 3) & 15) + (column & 1))) & uint32(1) != 0
        return found

    return named(added, visible)
