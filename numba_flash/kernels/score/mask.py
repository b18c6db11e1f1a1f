"""mask[b, h, q_index, k_index]: False removes a key."""

from numba import cuda


def make(config):
    """visible(at, arrays, strides), or None without a mask."""
    if not config.has("mask"):
        return None

    @cuda.jit(device=True)
    def visible(at, arrays, strides):
        row = at.b * strides.mask[0] + at.h * strides.mask[1] + at.q_index * strides.mask[2]
        return arrays.mask[row + at.k_index * strides.mask[3]] != 0

    return visible
