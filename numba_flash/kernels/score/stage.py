"""A stage of the score: its device functions for a score, and for a score in a fragment."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Stage(NamedTuple):
    """Functions of a score in natural units, in the kernel's computing type."""

    value: Callable[..., Any]  # (s, at, arrays, strides, score) -> the next s
    with_derivative: Callable[..., Any] | None = None  # likewise -> (the next s, its derivative by s); None: 1
    by_head: Callable[..., Any] | None = None  # (at) -> the derivative of the next s by the option's number of the head


class FragmentAt(NamedTuple):
    """The place of a score in a fragment, as the stages need it."""

    away: Any  # q_pos - k_pos times what `row_term` loaded for the row
    added: Any  # what reads.py loaded for this score


class FragmentStage(NamedTuple):
    """For a score in float32, or in float64 for float64. The score is s * factor in the scores' unit
    (kernels/steps/units.py): a factor that all scores share can wait, and is multiplied once."""

    value: Callable[..., Any]  # (s, factor, at, score) -> (the next s, the next factor)
    derivative: Callable[..., Any] | None = None  # (the next s) -> the derivative by the score before; None: 1
    row_term: Callable[..., Any] | None = None  # (b, h, arrays, strides) -> a number that the row's scores share, in
    # the scores' unit
