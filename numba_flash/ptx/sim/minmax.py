"""Twins of ptx.minmax."""

import numpy as np

from .registers import check_float


def maximum(x, y):
    return np.fmax(check_float(x), check_float(y))


def maximum_f64(x, y):
    return np.fmax(np.float64(x), np.float64(y))
