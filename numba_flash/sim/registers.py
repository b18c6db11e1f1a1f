"""What registers hold: 16-bit elements in pairs, and the mark of a value that is not there yet.

wgmma's accumulators hold POISON until its wait_group: a NaN that arithmetic hands on and whose bits say what
it is. Instructions that take registers raise when they meet it.
"""

import ml_dtypes
import numpy as np

from .errors import Misuse

POISON = 0x7FC0DEAD
POISON_FLOAT = np.array(POISON, np.uint32).view(np.float32)[()]
ELEMENTS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}


def halves(registers, kind):
    """(..., n) uint32 -> (..., 2 * n) float64: low half first."""
    return np.ascontiguousarray(registers).view(ELEMENTS[kind]).astype(np.float64)


def packed(low, high, kind):
    """Two float32 rounded to 16 bits, to nearest even, in one uint32."""
    pair = np.stack(np.broadcast_arrays(low, high), axis=-1).astype(np.float32)
    return np.ascontiguousarray(pair.astype(ELEMENTS[kind])).view(np.uint32)[..., 0]


def u32(value):
    """Any number as 32 bits, like a register."""
    return np.uint32(int(value) & 0xFFFFFFFF)


def table(element, count):
    """(rows, columns), each (32, count): where the elements of all lanes stand."""
    places = [[element(lane, i) for i in range(count)] for lane in range(32)]
    return tuple(np.moveaxis(np.array(places), -1, 0))


def check_float(x):
    """A float32 that is there."""
    x = np.float32(x)
    if x != x and x.view(np.uint32) == POISON:
        _raise()
    return x


def check(values, thread=None):
    """An array of 32-bit registers that are all there."""
    if (values.view(np.uint32) == POISON).any():
        _raise(thread)


def _raise(thread=None):
    raise Misuse("a wgmma accumulator is read before its wgmma.wait_group (or without commit_group)", thread)
