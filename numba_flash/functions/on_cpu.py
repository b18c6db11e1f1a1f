"""Functions of math as plain arithmetic without calls or branches, so that LLVM can vectorise them on a CPU.

x and the results are values of the code that is being compiled (compiled/code.py), and `f` creates them. float32 is
within 2 ulp, float64 within 4. The polynomials and the range reductions are those of the Cephes library.
"""

import math
from typing import Any

LOG2_E = 1.4426950408889634
# ln(2) in two parts; the first one times a small integer is exact.
LN2_HIGH = {4: 0.693359375, 8: 6.93145751953125e-1}
LN2_LOW = {4: -2.12194440e-4, 8: 1.42860682030941723212e-6}
EXP_RANGE = {4: (-104.0, 89.0), 8: (-746.0, 710.0)}  # beyond them the result is 0 or infinite
EXP_4 = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
EXP_P = (1.26177193074810590878e-4, 3.02994407707441961300e-2, 9.99999999999999999910e-1)
EXP_Q = (3.00198505138664455042e-6, 2.52448340349684104192e-3, 2.27265548208155028766e-1, 2.0)
LOG_4 = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG_P = (
    1.01875663804580931796e-4,
    4.97494994976747001425e-1,
    4.70579119878881725854,
    1.44989225341610930846e1,
    1.79368678507819816313e1,
    7.70838733755885391666,
)
LOG_Q = (
    1.0,
    1.12873587189167450590e1,
    4.52279145837532221105e1,
    8.29875266912776603211e1,
    7.11544750618563894466e1,
    2.31251620126765340583e1,
)
TANH_LIMIT = 0.625
TANH_4 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_P = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
TANH_Q = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


def _polynomial(terms: tuple[float, ...], x: Any) -> Any:
    """A polynomial of x; the highest power first."""
    y = x * 0 + terms[0] if len(terms) == 1 else x * terms[0] + terms[1]
    for term in terms[2:]:
        y = y * x + term
    return y


def _exp_parts(x: Any, f: Any) -> tuple[Any, Any]:
    """e^x = y * 2^n."""
    n = f.rint(x * LOG2_E)
    r = x - n * LN2_HIGH[f.bytes] - n * LN2_LOW[f.bytes]
    square = r * r
    if f.bytes == 4:
        return _polynomial(EXP_4, r) * square + r + 1, n
    odd = r * _polynomial(EXP_P, square)
    return odd / (_polynomial(EXP_Q, square) - odd) * 2 + 1, n


def exp(x: Any, f: Any) -> Any:
    low, high = EXP_RANGE[f.bytes]
    y, n = _exp_parts(f.where(x < low, f.number(low), f.where(x > high, f.number(high), x)), f)
    half = f.floor(n * 0.5)  # 2^n as two factors, neither of which is out of range
    return f.where(x != x, x, y * f.power_of_2(half) * f.power_of_2(n - half))


def log(x: Any, f: Any) -> Any:
    least, up = (2.0**-126, 25) if f.bytes == 4 else (2.0**-1022, 54)
    small = x < least
    mantissa, exponent = f.parts(f.where(small, x * 2.0**up, x))  # mantissa in [1/2, 1)
    exponent = f.where(small, exponent - up, exponent)
    below = mantissa < math.sqrt(0.5)
    exponent = f.where(below, exponent - 1, exponent)
    r = f.where(below, mantissa + mantissa, mantissa) - 1
    square = r * r
    if f.bytes == 4:
        y = r * square * _polynomial(LOG_4, r)
    else:
        y = r * (square * _polynomial(LOG_P, r) / _polynomial(LOG_Q, r))
    y = r + (y + exponent * LN2_LOW[f.bytes] - square * 0.5) + exponent * LN2_HIGH[f.bytes]
    outside = f.where(x == 0, f.number(-math.inf), f.where(x < 0, f.number(math.nan), x))
    return f.where((x > 0) & (x < math.inf), y, outside)


def log1p(x: Any, f: Any) -> Any:
    u = x + 1
    y = log(u, f)
    return f.where((u > 0) & (u < math.inf), y - ((u - 1) - x) / u, y)  # corrects the rounding of u


def tanh(x: Any, f: Any) -> Any:
    square = x * x
    if f.bytes == 4:
        small = _polynomial(TANH_4, square)
    else:
        small = _polynomial(TANH_P, square) / _polynomial(TANH_Q, square)
    size = f.fabs(x)
    y, n = _exp_parts(f.where(size > 40, f.number(-80), size * -2), f)
    e = y * f.power_of_2(n)
    large = (1 - e) / (e + 1)
    return f.where(size < TANH_LIMIT, small * square * x + x, f.where(x < 0, -large, large))


FUNCTIONS = dict(exp=exp, log=log, log1p=log1p, tanh=tanh)
