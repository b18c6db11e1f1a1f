"""Twins of ptx.cvt."""

import numpy as np

from .registers import check_float, packed


def pack_f16x2(low, high):
    return packed(check_float(low), check_float(high), "f16")


def pack_bf16x2(low, high):
    return packed(check_float(low), check_float(high), "bf16")


def low_f16(two):
    return np.float32(np.uint16(int(two) & 0xFFFF).view(np.float16))


def high_f16(two):
    return np.float32(np.uint16(int(two) >> 16).view(np.float16))
