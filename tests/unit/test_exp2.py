"""2 ** x in float64, beside numbers of 40 digits."""

from decimal import Decimal, localcontext

import numpy as np
import pytest

from numba_flash.kernels.steps import exp2 as module

exp2 = module.exp2.py_func


def exact(x):
    with localcontext() as context:
        context.prec = 40
        return Decimal(2) ** Decimal(float(x))


def test_it_is_at_most_a_unit_of_the_last_place_off():
    """As the file derives; without fused multiply-adds each of the last two steps rounds once more."""
    generator = np.random.default_rng(0)
    spread = np.concatenate([generator.uniform(-0.5, 0.5, 400), generator.uniform(-1022, 1023, 400)])
    edges = [0.0, -0.0, 0.5, -0.5, 0.49999999999999994, 1.0, 1022.9, -1022.0, 1e-300, -1e-17]
    for x in np.concatenate([spread, edges]):
        right = exact(x)
        assert abs(Decimal(float(exp2(np.float64(x)))) - right) <= right * Decimal(2) ** -52, x


def test_its_polynomial_alone_is_four_times_as_exact_as_a_rounding():
    coefficients = [getattr(module, f"C{i}") for i in range(1, 12)]
    with localcontext() as context:
        context.prec = 40
        for i in range(-200, 201):
            f, p = Decimal(i) / 400, Decimal(0)
            for c in reversed(coefficients):
                p = p * f + Decimal(c)
            right = Decimal(2) ** f
            assert abs(1 + f * p - right) <= right * Decimal(2) ** -55


@pytest.mark.parametrize(("x", "expected"), [(-np.inf, 0), (-1e300, 0), (-1022.5, 0), (np.nan, np.nan)])
def test_what_is_too_small_is_zero_and_nan_stays(x, expected):
    with np.errstate(all="ignore"):
        np.testing.assert_equal(exp2(np.float64(x)), np.float64(expected))


def test_nan_of_any_payload_stays():
    for payload in (1, 0x7FF, 0x123456789ABC):
        x = np.array(0x7FF8000000000000 | payload, np.uint64).view(np.float64)[()]
        with np.errstate(all="ignore"):
            assert np.isnan(exp2(x))
