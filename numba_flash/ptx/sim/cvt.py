"""Stand-ins for ptx.cvt."""

import numpy as np

from .errors import InstructionError
from .registers import ELEMENTS, check_float

# Room for two numbers and what becomes of them: new arrays would take three times as long. One thread runs at a time.
_PAIR = np.empty(2, np.float32)
_TWO = {kind: (two := np.empty(2, element), two.view(np.uint32)) for kind, element in ELEMENTS.items()}


def pack_f16x2(low, high):
    return _packed(low, high, "f16")


def pack_bf16x2(low, high):
    return _packed(low, high, "bf16")


def _packed(low, high, kind):
    """registers.packed of two numbers, most of which come here."""
    two, as_bits = _TWO[kind]
    _PAIR[0], _PAIR[1] = check_float(low), check_float(high)
    two[:] = _PAIR
    return as_bits[0]


def low_f16(two):
    return np.float32(np.uint16(int(two) & 0xFFFF).view(np.float16))


def high_f16(two):
    return np.float32(np.uint16(int(two) >> 16).view(np.float16))


def whole_f32(x):
    return _whole(x)


def whole_f64(x):
    return _whole(x)


def _whole(x):
    if not abs(x) < 2.0**63:
        raise InstructionError(f"{x} is no int64")
    return np.int64(np.rint(x))
