"""Derivatives of score functions where they end: at huge, tiny and infinite numbers, at ties, where they saturate."""

import math

import numpy as np
import pytest
from helpers.derivatives import INF, Table

import numba_flash

# expression: {s: its derivative}
LIMITS = {
    # 0 where a function saturates, though the number in it, or its derivative, overflows
    "math.tanh(s)": {0: 1, 400: 0, -1e300: 0, INF: 0, -INF: 0},
    "math.tanh(math.exp(s))": {-800: 0, 800: 0, INF: 0, -INF: 0},
    "math.tanh(s ** 9)": {1e200: 0, -1e200: 0},
    "math.atan(math.exp(s))": {800: 0},
    "math.erf(math.exp(s))": {800: 0},
    "math.erfc(math.exp(s))": {800: 0},
    "math.exp(-math.exp(s))": {800: 0},
    "math.expm1(-math.exp(s))": {800: 0},
    "math.exp(s)": {-INF: 0, -1e4: 0, 0: 1},
    "1 / (1 + math.exp(-s))": {-1e4: 0, -800: 0, 0: 0.25, 800: 0, INF: 0, -INF: 0},
    "2.0 / (3.0 + math.exp(s))": {800: 0, INF: 0, -INF: 0},
    "s / (1 + math.exp(-s))": {-800: 0, 800: 1},
    "1 / s": {INF: 0, 1e300: 0, 0.0: -INF, 2: -0.25},
    "s ** -1": {INF: 0, 1e300: 0, 0.0: -INF, 2: -0.25},
    "s ** -2": {INF: 0, -INF: 0, 1e200: 0, 0.0: -INF, -1e-200: INF, 1e-200: -INF, 2: -0.25},
    "s ** -3.0": {INF: 0, 1e200: 0, 1: -3},
    "math.exp(s) ** -1.0": {800: 0},
    "math.exp(s) ** -2": {800: 0},
    "2.0 ** s": {-INF: 0, -1e4: 0},
    "2.0 ** -math.exp(s)": {800: 0},
    # what does not depend on s gives nothing, however steep what follows is
    "math.sqrt(max(s, 0.0))": {-1: 0, -INF: 0, 4: 0.25, 0.0: INF},
    "math.log(max(s, 0.0))": {-1: 0, 2: 0.5},
    "math.log1p(max(s, -1.0))": {-2: 0},
    "math.log2(max(s, 0.0))": {-1: 0},
    "math.log10(max(s, 0.0))": {-1: 0},
    "math.asin(min(s, 1.0))": {2: 0},
    "math.acos(min(s, 1.0))": {2: 0},
    "math.acosh(max(s, 1.0))": {0: 0},
    "math.atanh(min(s, 1.0))": {2: 0},
    "max(s, 0.0) ** 0.5": {-1: 0},
    "max(s, 0.0) ** -1": {-1: 0},
    "1 / (1 + 1 / max(s, 0.0))": {-1: 0},
    "math.tanh(1 / max(s, 0.0))": {-1: 0},
    "1.0 if s < 0 else math.sqrt(s)": {-1: 0, 1: 0.5},
    # powers
    "s ** 0.0": {0: 0, -2: 0, INF: 0, 3: 0},
    "s ** 0": {0: 0, INF: 0},
    "math.pow(s, 0.0)": {0: 0, INF: 0},
    "0.0 ** s": {0: 0, 1: 0, 5: 0},
    "s ** 1.0": {0: 1, INF: 1},
    "s ** 2.0": {0: 0, -3: -6},
    "s ** 0.5": {0: INF, INF: 0},
    "abs(s) ** 3": {0: 0, -2: -12},
    # where there is none, that of torch
    "abs(s)": {0: 0, -2: -1, INF: 1, -INF: -1},
    "math.fabs(s)": {0: 0, -2: -1},
    "math.copysign(s, -1.0)": {0: 0, 2: -1, -2: 1, INF: -1},
    "math.hypot(s, 0.0)": {0: 0, -2: -1, 1e300: 1},
    "math.hypot(s, s)": {0: 0},
    "math.hypot(s, math.inf)": {1: 0},
    "math.sqrt(s * s)": {0: 0, 3: 1},
    "math.atan2(s, 0.0)": {0: 0, 2: 0},
    "math.atan2(s, s)": {0: 0, 1: 0},
    "math.atan2(s, math.inf)": {1: 0},
    "math.atan2(s, 1.0)": {INF: 0, 1e200: 0, 0: 1},
    "math.atan2(1.0, s)": {INF: 0, -1e200: 0, 0: -1},
    "max(s, 0.0)": {0: 1, -1: 0, 1: 1, INF: 1},
    "max(0.0, s)": {0: 0, -1: 0, 1: 1},
    "min(s, 0.0)": {0: 1, -1: 1, 1: 0},
    "min(max(s, -1.0), 1.0)": {-1: 1, 1: 1, 2: 0, -2: 0},
    # steps, and what is left of a division
    "math.floor(s) + 0.0": {0: 0, 0.5: 0},
    "math.ceil(s) + 0.0": {1: 0},
    "round(s) + 0.0": {0.5: 0},
    "s // 1.0": {0: 0, 1e300: 0},
    "s % 2.0": {3: 1, -3: 1, 0: 1},
    "math.fmod(s, 2.0)": {3: 1, -3: 1},
    "math.fmod(7.0, s)": {2: -3, 1e300: 0, INF: 0},
    "7.0 % s": {2: -3, INF: 0},
    # the rest far away
    "math.sin(s)": {0: 1},
    "math.asinh(s)": {INF: 0, 0: 1},
    "math.sinh(s)": {0: 1, INF: INF},
    "math.cosh(s)": {0: 0},
    "math.log(s)": {INF: 0, 0.0: INF},
    "math.sqrt(s)": {INF: 0, 0.0: INF},
    "math.tan(s)": {0: 1},
    "math.acos(s)": {1: -INF, 0: -1},
    "math.degrees(s)": {INF: 180 / np.pi},
}  # fmt: skip


TABLE = Table(LIMITS)


@pytest.mark.parametrize("way", [TABLE.python, TABLE.compiled])
def test_derivatives_at_limits(way):
    found = {expression: way(expression, expected) for expression, expected in LIMITS.items()}
    wrong = {
        expression: (dict(zip(expected, found[expression].tolist(), strict=True)), expected)
        for expression, expected in LIMITS.items()
        if not np.allclose(found[expression], list(expected.values()), rtol=1e-12, atol=1e-290)
    }
    assert not wrong


# Where float32 overflows, and float64 does not.
@pytest.mark.parametrize("way", [TABLE.python, TABLE.compiled])
def test_derivatives_at_limits_in_float32(way):
    limits = {
        "1 / (1 + math.exp(-s))": -95,
        "math.tanh(math.exp(s))": 95,
        "math.tanh(s ** 9)": 1e30,
        "s ** -2": 1e30,
        "math.atan2(s, 1.0)": 1e30,
        "2.0 ** -math.exp(s)": 95,
    }
    assert {expression: way(expression, [s], "float32").item() for expression, s in limits.items()} == dict.fromkeys(
        limits, 0
    )


# In the call for y, the number that is read of x has the derivative 0.
@pytest.mark.parametrize("kernel", ["reference", "cpu"])
def test_a_steep_function_of_one_array_leaves_the_gradient_of_another(kernel):
    q, v = np.zeros((1, 1, 2, 1)), np.array([[[[1.0], [3.0]]]])
    options = dict(score_mod=lambda s, b, h, i, j, x, y: s + math.sqrt(x[0]) + y[j], aux=(np.zeros(1), np.zeros(2)))
    o, lse = numba_flash.attention(q, q, v, **options, return_lse=True, kernel=kernel)
    found = numba_flash.attention_backward(v, q, q, v, o, lse, **options, wanted=("daux[1]",), kernel=kernel)
    assert np.allclose(found.daux[1], [-2, 2])
