"""The numbers that a tensor-core kernel computes scores with: float32 and the GPU's own functions, or float64 and
ours."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64

from ...ptx import approx, minmax, shfl
from .basics import inlined
from .exp2 import exp2


class Numbers(NamedTuple):
    """A type and its device functions. exp2 gives 0 for numbers that are too small, and for -inf."""

    real: Any
    exp2: Callable[..., Any]
    log2: Callable[..., Any]
    reciprocal: Callable[..., Any]
    maximum: Callable[..., Any]  # if one of the two is NaN, the other one
    bfly: Callable[..., Any]  # (value, mask) -> the value of lane (own lane ^ mask)
    idx: Callable[..., Any]  # (value, lane) -> that lane's value
    warp_sum: Callable[..., Any]  # (value) -> the sum over all lanes
    ceil: Callable[..., Any]
    minus_inf: Any
    lowest: Any  # finite


@inlined
def _log2_f64(x):
    return math.log2(x)


@inlined
def _reciprocal_f64(x):
    return float64(1) / x


@functools.cache
def of(compute_dtype):
    if compute_dtype == "float64":
        functions, shuffles = (exp2, _log2_f64, _reciprocal_f64), (shfl.bfly_f64, shfl.idx_f64, shfl.sum_f64)
        lowest = float64(np.finfo(np.float64).min)
        return Numbers(float64, *functions, minmax.maximum_f64, *shuffles, approx.ceil_f64, float64(-math.inf), lowest)
    functions, shuffles = (approx.ex2, approx.lg2, approx.rcp), (shfl.bfly_f32, shfl.idx_f32, shfl.sum_f32)
    lowest = float32(np.finfo(np.float32).min)
    return Numbers(float32, *functions, minmax.maximum, *shuffles, approx.ceil, float32(-math.inf), lowest)
