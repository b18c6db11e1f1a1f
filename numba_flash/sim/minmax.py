"""Twins of ptx.minmax."""

import numpy as np

from .registers import check_float


def maximum(x, y):
    return np.fmax(check_float(x), check_float(y))
