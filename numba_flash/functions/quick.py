"""Functions of math for GPU kernels with 16-bit elements: right to some units of float32's last place, in a few
instructions without a branch. libdevice's are right to one or two units, but branch, so scores are not computed side by
side.

f: as in rules.py; f.approx(name, x) is one of PTX's approximate instructions.
"""

import math
from typing import Any

SMALL = 0.25


def reciprocal(x: Any, f: Any) -> Any:
    return f.approx("rcp", x)


def exp(x: Any, f: Any) -> Any:
    return f.approx("ex2", x * (1 / math.log(2)))


def tanh(x: Any, f: Any) -> Any:
    """Below SMALL a polynomial: 1 - 2 / (1 + e^2x) would lose the digits of x."""
    square = x * x
    small = x + x * square * (square * (square * (-17 / 315) + 2 / 15) + -1 / 3)
    large = reciprocal(exp(x * 2, f) + 1, f) * -2 + 1
    return f.where(f.fabs(x) < SMALL, small, large)


FUNCTIONS = dict(exp=exp, tanh=tanh)
