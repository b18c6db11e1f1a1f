"""What a stage of the score gives: device functions of one score, and of one score in a fragment."""

from collections.abc import Callable
from typing import Any, NamedTuple

LOG2_E = 1.4426950408889634


class HeadGradient(NamedTuple):
    """Of an option that is one number for each head."""

    of_row: Callable[..., Any]  # (b, h, q_index, arrays, strides, sizes) -> what the row gives
    store: Callable[..., Any]  # (the sum, b, h, arrays, strides)


class Stage(NamedTuple):
    """Of a score in natural units, in the kernel's computing type."""

    value: Callable[..., Any]  # (s, at, arrays, strides, score) -> the next s
    with_derivative: Callable[..., Any] | None = None  # likewise -> (the next s, its derivative by s); None: 1
    by_head: Callable[..., Any] | None = None  # (at) -> the next s' derivative by the option's number of the head


def exponent_unit(config: Any) -> float:
    """What a score in a fragment is counted in: e^score is 2^score where it counts powers of 2.

    Not with a bias, which may be as large as float32 allows, and then log2(e) times it would not be a number; or so
    large that rounding log2(e) times it would count.
    """
    return 1.0 if config.has("bias") else LOG2_E


class FragmentAt(NamedTuple):
    """Where a score of a fragment stands, as far as the stages of its problem ask for it."""

    term: Any  # what `row_term` loaded for the row
    distance: Any  # q_pos - k_pos
    added: Any  # what was loaded for this score alone (reads.py)


class FragmentStage(NamedTuple):
    """Of a score in float32, for float64 in float64, which is s * factor in units of exponent_unit: a factor that is
    the same for all scores can so wait until it is multiplied once."""

    value: Callable[..., Any]  # (s, factor, at, score) -> (the next s, the next factor)
    derivative: Callable[..., Any] | None = None  # (the next s) -> the derivative by the score before; None: 1
    row_term: Callable[..., Any] | None = None  # (b, h, arrays, strides) -> a number that the row's scores share
