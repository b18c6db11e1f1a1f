"""Twins of ptx.cvt."""

from .registers import check_float, packed


def pack_f16x2(low, high):
    return packed(check_float(low), check_float(high), "f16")


def pack_bf16x2(low, high):
    return packed(check_float(low), check_float(high), "bf16")
