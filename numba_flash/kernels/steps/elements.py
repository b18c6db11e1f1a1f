"""Converts elements in global memory to the numbers that a kernel computes with, and back.

float16, float32 and float64 are read as they are. bfloat16 is the upper half of a float32: its 16 bits are read (the
pointer's elements are uint16) and shifted up. Rounding back is to nearest, ties to even, like the hardware's cvt.rn.
Numbers are float32, or float64 for float64.
"""

import functools

import numpy as np
from numba import cuda, float32, float64, types, uint16, uint32

from ...ptx import cvt
from .basics import inlined

# Every dtype that an array may have (arrays/dtypes.py); a bool is a byte (abi/arguments.py, element_type).
_WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
ELEMENT_TYPES = {name: getattr(types, name) for name in ("float16", "float32", "float64", *_WHOLE)}
ELEMENT_TYPES["bfloat16"] = uint16
COMPUTE_TYPES = {"float16": float32, "bfloat16": float32, "float32": float32, "float64": float64}


@cuda.jit(device=True)
def _load_bfloat16(pointer, index):
    return uint32(uint32(pointer[index]) << uint32(16)).view(np.float32)


@cuda.jit(device=True)
def _store_bfloat16(pointer, index, value):
    bits = float32(value).view(np.uint32)
    if value != value:
        rounded = uint32(0x7FC0)  # NaN stays NaN: rounding its bits could give an infinity
    else:
        rounded = (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)
    pointer[index] = uint16(rounded)


def loader(dtype, compute):
    """load(pointer, index) -> the element as a number of type `compute`."""
    if dtype == "bfloat16":
        return _load_bfloat16

    @cuda.jit(device=True)
    def load(pointer, index):
        return compute(pointer[index])

    return load


def storer(dtype):
    """store(pointer, index, value): rounds value to the element type."""
    if dtype == "bfloat16":
        return _store_bfloat16
    element = ELEMENT_TYPES[dtype]

    @cuda.jit(device=True)
    def store(pointer, index, value):
        pointer[index] = element(value)

    return store


@functools.cache
def halves(dtype):
    """-> half_of, a device function: (two, i) -> number i of two of 16 bits in a register, as float32."""

    is_float16 = dtype == "float16"

    @inlined
    def half_of(two, i):
        if is_float16:
            return cvt.high_f16(two) if i else cvt.low_f16(two)
        return uint32(two & uint32(0xFFFF0000) if i else two << uint32(16)).view(np.float32)

    return half_of
