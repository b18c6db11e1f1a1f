"""Stand-in for ptx.bits."""

import numpy as np


def highest(word):
    return np.int32(int(word).bit_length() - 1)


def count(word):
    return np.int32(int(word).bit_count())


def multiply_wide(x, y):
    return np.uint64(int(x) * int(y))


def push_carry(bits, x, y):
    return np.uint32((2 * int(bits) + (int(x) + int(y) >> 32)) & 0xFFFFFFFF)
