"""Stand-ins for ptx.approx: correctly rounded, which is within what the GPU promises; subnormals are zero."""

import numpy as np

from .registers import check_float

_TINY = np.finfo(np.float32).tiny


def flushed(x):
    """Subnormals as zeros of their sign."""
    return x * np.float32(0) if -_TINY < x < _TINY else x


def ex2(x):
    return flushed(np.exp2(flushed(check_float(x))))


def lg2(x):
    return flushed(np.log2(flushed(check_float(x))))


def rcp(x):
    return flushed(np.float32(1) / flushed(check_float(x)))


def ceil(x):
    return np.ceil(check_float(x))
