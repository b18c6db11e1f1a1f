"""The contents of registers: 16-bit elements in pairs, and the mark of a value that is not there yet.

wgmma's accumulators hold RUNNING until its wait_group: a signaling NaN, which arithmetic hands on as the quiet
one with the same payload. So instructions that take registers know both and raise, and an accumulator that
was computed with in place (scaled, say) is no longer the signaling one.
"""

import functools

import numpy as np

from .errors import InstructionError

RUNNING = np.uint32(0x7F80DEAD)
_QUIET = np.uint32(0x00400000)
_TOUCHED = RUNNING | _QUIET
_MARK = RUNNING.tobytes()[:2]  # in both; most registers have these bytes nowhere, and to look for them is cheap
_UINT32 = np.dtype(np.uint32)


@functools.cache
def element(kind):
    """The NumPy type of "f16" or "bf16"."""
    if kind == "f16":
        return np.dtype(np.float16)
    import ml_dtypes  # where it is missing, as in a browser, the other types work

    return np.dtype(ml_dtypes.bfloat16)


def halves(registers, kind):
    """(..., n) uint32 -> (..., 2 * n) float64: low half first."""
    return np.ascontiguousarray(registers).view(element(kind)).astype(np.float64)


def packed(low, high, kind):
    """Two float32 rounded to 16 bits, to nearest even, in one uint32."""
    pair = np.stack(np.broadcast_arrays(low, high), axis=-1).astype(np.float32)
    return np.ascontiguousarray(pair.astype(element(kind))).view(np.uint32)[..., 0]


def u32(value):
    """Any number as 32 bits, like a register."""
    if type(value) is np.uint32:
        return value
    return np.uint32(int(value) & 0xFFFFFFFF)


def bits(values):
    """32-bit registers as uint32."""
    return values if values.dtype is _UINT32 else values.view(_UINT32)


def table(element, count):
    """(rows, columns), each (32, count): where the elements of all lanes stand."""
    places = [[element(lane, i) for i in range(count)] for lane in range(32)]
    return tuple(np.moveaxis(np.array(places), -1, 0))


def some(flags):
    """Whether any of an array of bool is true. Its bytes know in a tenth of the time that np.count_nonzero takes."""
    return 1 in flags.tobytes()


def check_float(x):
    """A float32 that is there."""
    if type(x) is not np.float32:  # asking takes a sixth of the time of converting
        x = np.float32(x)
    if x != x and x.view(np.uint32) | _QUIET == _TOUCHED:
        _raise()
    return x


def is_running(values):
    """Whether any of an array of 32-bit registers is not there yet."""
    return _MARK in values.tobytes() and some(bits(values) | _QUIET == _TOUCHED)


def check(values, thread=None):
    """An array of 32-bit registers that are all there."""
    if is_running(values):
        _raise(thread)


def _raise(thread=None):
    raise InstructionError("a wgmma accumulator is read before its wgmma.wait_group (or without commit_group)", thread)
