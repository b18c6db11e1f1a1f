"""Arithmetic on numbers of tiles and heads, which are never negative."""

from numba import int32, uint32

from .inlined import inlined


@inlined
def divide(x, y):
    """x // y in 32 bits. For signed 64-bit numbers, which Numba makes of Python's, it takes a hundred instructions."""
    return int32(uint32(x) // uint32(y))


@inlined
def tiles_of(rows, in_tile):
    """How many tiles of so many rows there are."""
    return divide(int32(rows) + int32(in_tile - 1), in_tile)
