"""Stand-ins for ptx.approx: correctly rounded, which is within what the GPU promises; subnormals are zero."""

import numpy as np

from .registers import check_float

_TINY = np.finfo(np.float32).tiny
_MINUS_TINY, _ZERO, _ONE = -_TINY, np.float32(0), np.float32(1)


def flushed(x):
    """Subnormals as zeros of their sign."""
    return x * _ZERO if _MINUS_TINY < x < _TINY else x


def ex2(x):
    return flushed(np.exp2(flushed(check_float(x))))


def lg2(x):
    return flushed(np.log2(flushed(check_float(x))))


def rcp(x):
    return flushed(_ONE / flushed(check_float(x)))


def ceil(x):
    return np.ceil(check_float(x))


def ceil_f64(x):
    return np.ceil(np.float64(x))
