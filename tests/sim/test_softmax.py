"""The three softmax kernels, simulated, against the oracle; and what they are there for."""

import numpy as np
import pytest

import numba_flash
from numba_flash import testing

KERNELS = ("safe", "online", "blocked")


def agrees(y, x):
    with np.errstate(invalid="ignore"):
        expected = np.exp(x.astype(np.float64) - x.astype(np.float64).max(-1, keepdims=True))
        expected /= expected.sum(-1, keepdims=True)
    eps = 4 * testing.EPS[x.dtype.name] + 16 * testing.EPS["float64" if x.dtype == np.float64 else "float32"]
    return y.dtype == x.dtype and np.allclose(y.astype(np.float64), expected, rtol=eps, atol=1e-7, equal_nan=True)


# One element, fewer and more than the 32 threads of a block, and leading axes.
@pytest.mark.parametrize("shape", [(1,), (5,), (3, 70), (2, 3, 33), (40, 2)])
@pytest.mark.parametrize("dtype", testing.DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_softmax(kernel, dtype, shape):
    x = (3 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)
    assert agrees(numba_flash.softmax(x, kernel=kernel), x)


# Just past what e^x can hold in each type: 65504 = e^11.09, 3.4e38 = e^88.7, 1.8e308 = e^709.8.
@pytest.mark.parametrize(("dtype", "large"), [("float16", 12), ("float32", 89), ("float64", 710)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_no_overflow_where_the_plain_formula_overflows(kernel, dtype, large):
    x = np.array([[1, large, 3], [-large, -2 * large, -large]], dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        e = np.exp(x)
        plain = e / e.sum(-1, keepdims=True)
    assert np.isnan(plain[0]).any(), "the plain formula does not overflow here, so this shows nothing"
    y = numba_flash.softmax(x, kernel=kernel)
    assert np.isfinite(y).all() and agrees(y, x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_infinities_and_nan(kernel):
    inf, nan = np.inf, np.nan
    x = np.array([[1, -inf, 2], [-inf, 0, -inf], [nan, 1, 2], [1, nan, 2], [-inf] * 3, [0, 1, nan]], np.float32)
    assert agrees(numba_flash.softmax(x, kernel=kernel), x)


@pytest.mark.parametrize("kernel", KERNELS)
def test_out_and_strides(kernel):
    x = np.random.default_rng(1).standard_normal((6, 20), dtype=np.float32)[::2, ::-2]
    out = np.full((3, 20), 7, np.float32)[:, ::2]
    assert numba_flash.softmax(x, kernel=kernel, out=out) is out
    assert agrees(out, x) and (out.base[:, 1::2] == 7).all()
    assert numba_flash.softmax(np.empty((0, 4), np.float32), kernel=kernel).shape == (0, 4)
