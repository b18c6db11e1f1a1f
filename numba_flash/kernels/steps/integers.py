"""Arithmetic on numbers of tiles and heads, which are never negative."""

from numba import cuda, int32, uint32


@cuda.jit(device=True, inline="always")
def divide(x, y):
    """x // y; of signed 64-bit numbers, which is what Numba makes of Python's, it is a hundred instructions."""
    return int32(uint32(x) // uint32(y))
