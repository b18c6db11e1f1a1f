"""Stand-ins for ptx.special."""

from .now import current
from .numbers import int32


def thread_index():
    return int32(current().threadIdx.x)


def block_index():
    return int32(current().blockIdx.x)


def block_count():
    return int32(current().block.grid[0])


def opaque(number):
    return number
