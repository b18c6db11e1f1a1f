"""The range of the result of an operator on whole numbers: (least, largest), both included.

Positions are known to lie within 0 to NARROW (function.py), so that differences of two, and most of what is made of
them, fit into an int32. A GPU takes two or three instructions for each one in int64. ANY: nothing is known.
"""

import itertools
import operator
from typing import Any

from .number_types import ANY, Within, fits


def _between(values: Any) -> Within:
    found = list(values)
    return min(found), max(found)


def _of_ends(operation: Any) -> Any:
    """The range of an operation whose extremes are at the ends of both operands."""
    return lambda a, b: _between(itertools.starmap(operation, itertools.product(a, b)))


def _quotient(a: Within, b: Within) -> Within:
    return _of_ends(operator.floordiv)(a, b) if b[0] > 0 else ANY


def _remainder(a: Within, b: Within) -> Within:
    return (0, b[1] - 1) if b[0] > 0 else ANY


def _common_bits(a: Within, b: Within) -> Within:
    ends = [end for least, end in (a, b) if least >= 0]
    return (0, min(ends)) if ends else ANY


def _all_bits(a: Within, b: Within) -> Within:
    return (0, 2 ** max(a[1], b[1]).bit_length() - 1) if min(a[0], b[0]) >= 0 else ANY


def _shifted_right(a: Within, b: Within) -> Within:
    return _of_ends(operator.rshift)(a, b) if b[0] >= 0 and b[1] < 64 else ANY


def _shifted_left(a: Within, b: Within) -> Within:
    return _of_ends(operator.lshift)(a, b) if b[0] >= 0 and b[1] < 64 else ANY


BINARY = dict(
    add=_of_ends(operator.add),
    sub=_of_ends(operator.sub),
    mul=_of_ends(operator.mul),
    floordiv=_quotient,
    mod=_remainder,
    and_=_common_bits,
    or_=_all_bits,
    xor=_all_bits,
    lshift=_shifted_left,
    rshift=_shifted_right,
)


def _known(found: Within) -> Within:
    """The limits found, or ANY if they exceed int64: then numbers are computed modulo 2^64 and nothing is known."""
    return found if fits(found, ANY) else ANY


def of_binary(name: str, a: Within, b: Within) -> Within:
    return _known(BINARY[name](a, b) if name in BINARY else ANY)


def of_unary(key: Any, a: Within) -> Within:
    return _known(UNARY[key](a))


def _negative(a: Within) -> Within:
    return -a[1], -a[0]


def _size(a: Within) -> Within:
    return max(a[0], -a[1], 0), max(-a[0], a[1])


def _inverted(a: Within) -> Within:
    return ~a[1], ~a[0]


UNARY = {operator.neg: _negative, operator.pos: lambda a: a, abs: _size, operator.invert: _inverted}


def least(*all_of: Within) -> Within:
    return min(x[0] for x in all_of), min(x[1] for x in all_of)


def largest(*all_of: Within) -> Within:
    return max(x[0] for x in all_of), max(x[1] for x in all_of)
