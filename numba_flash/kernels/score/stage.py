"""What a stage of the score gives: device functions of one score, and of one score in a fragment."""

from collections.abc import Callable
from typing import Any, NamedTuple

LOG2_E = 1.4426950408889634


class Stage(NamedTuple):
    """Of a score in natural units, in the kernel's computing type."""

    value: Callable[..., Any]  # (s, at, arrays, strides, score) -> the next s
    with_derivative: Callable[..., Any] | None = None  # likewise -> (the next s, its derivative by s); None: 1


class FragmentStage(NamedTuple):
    """Of a score in float32, or float64 for float64, and units of log2(e), which is s * factor: a factor that is the
    same for all scores can so wait until it is multiplied once. distance: q_pos - k_pos; term: what `row_term` loaded
    for the row."""

    value: Callable[..., Any]  # (s, factor, term, distance, score) -> (the next s, the next factor)
    derivative: Callable[..., Any] | None = None  # (the next s) -> the derivative by the score before; None: 1
    row_term: Callable[..., Any] | None = None  # (b, h, arrays, strides) -> a number that the row's scores share
