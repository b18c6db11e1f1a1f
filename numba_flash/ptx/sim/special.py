"""Stand-ins for ptx.special."""

import numpy as np

from .now import current


def thread_index():
    return np.int32(current().threadIdx.x)


def block_index():
    return np.int32(current().blockIdx.x)


def block_count():
    return np.int32(current().block.grid[0])


def opaque(number):
    return number
