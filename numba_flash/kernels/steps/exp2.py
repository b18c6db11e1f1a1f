"""2 ** x in float64 in 17 instructions; libdevice's exp takes several times as many.

x = n + f with n whole and |f| <= 1/2, and 2^f = 1 + f * (c1 + f * (c2 + ...)). The coefficients are those of the
polynomial through (2^f - 1) / f at the 11 Chebyshev nodes of that interval, rounded. In exact arithmetic it is at most
2^-55 off, relative to 2^f. Each of its 11 steps is a fused multiply-add. All but the last are multiplied by |f| <= 1/2
at least once, so rounding adds at most 0.5 ulp in the last one and 0.36 ulp in those before.
"""

import numpy as np
from numba import float64, int64

from .basics import inlined

# 6755399441055744 = 1.5 * 2^52: added to a number below 2^51, it leaves its nearest whole number in the lowest bits.
ROUNDING = 6755399441055744.0
SMALLEST = -1022.0  # below it results would be subnormal; they are 0
C1, C2, C3, C4 = 0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888
C5, C6, C7 = 0.0013333558146416936, 0.0001540353044173605, 1.525273382983612e-05
C8, C9 = 1.321544258792169e-06, 1.0178062445845774e-07
C10, C11 = 7.072585949269223e-09, 4.4549605981865186e-10


@inlined
def exp2(x):
    """2 ** x of a float64 up to 1023; 0 below -1022 and for -inf, NaN for NaN."""
    shifted = x + float64(ROUNDING)
    # 2^n: n becomes the exponent; higher bits of the number are shifted out.
    power = ((shifted.view(np.int64) << int64(52)) + int64(1023 << 52)).view(np.float64)
    f = x - (shifted - float64(ROUNDING))
    p = float64(C11)
    p = p * f + float64(C10)
    p = p * f + float64(C9)
    p = p * f + float64(C8)
    p = p * f + float64(C7)
    p = p * f + float64(C6)
    p = p * f + float64(C5)
    p = p * f + float64(C4)
    p = p * f + float64(C3)
    p = p * f + float64(C2)
    p = p * f + float64(C1)
    p = p * f + float64(1)
    return float64(0) if x < float64(SMALLEST) else p * power
