"""Stand-ins for ptx.minmax."""

import numpy as np

from .registers import check_float


def maximum(x, y):
    return _larger(check_float(x), check_float(y))


def maximum_f64(x, y):
    return _larger(np.float64(x), np.float64(y))


def _larger(x, y):
    """np.fmax, which takes six times as long: the other where one is NaN."""
    return x if x >= y or y != y else y


def minimum_nan(x, y):
    x, y = check_float(x), check_float(y)
    return x if x <= y or x != x else y
