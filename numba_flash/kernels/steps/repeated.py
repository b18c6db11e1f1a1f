"""A device function that calls another one for 0, 1, 2 and so on, without a loop.

The compiler does not unroll a loop with so much in it, and an accumulator whose index is not a constant would lie in
memory. Here each half of the calls is a function of its own. Both halves are the same function, so Numba compiles 5
functions for 16 calls.
"""

from collections.abc import Callable
from typing import Any

from numba import int32

from .basics import inlined, nothing


def repeated(step: Callable[..., Any], count):
    """-> calls(*arguments): step(0, *arguments), step(1, *arguments) and so on, `count` in all.

    step's first argument is an int32. After inlining it is a constant, as the others are that follow from it.
    """
    if count == 0:
        return nothing
    many = _from(step, count, {})

    @inlined
    def calls(*arguments):
        many(int32(0), *arguments)

    return calls


def _from(step, count, made: dict[int, Any]):
    """-> the calls from a first number on. made: those that exist, by their count."""
    if count == 1:
        return step
    if count not in made:
        half = count // 2
        first_half, second_half = _from(step, half, made), _from(step, count - half, made)

        @inlined
        def both(first, *arguments):
            first_half(first, *arguments)
            second_half(int32(first + half), *arguments)

        made[count] = both
    return made[count]
