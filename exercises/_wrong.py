"""The error that a check raises for a wrong result."""

import numpy as np


class Wrong(Exception):
    """str() is for the student."""


def expect(condition, text):
    if not condition:
        raise Wrong(text)


def as_array(what, got, shape):
    """The result of a student's function, as an array of that shape."""
    nothing = got is None or isinstance(got, (tuple, list)) and any(x is None for x in got)
    expect(not nothing, f"{what} is {got}: is a `return` missing?")
    try:
        made = np.asarray(got, np.float64)
    except (TypeError, ValueError):
        raise Wrong(f"{what} is no array of numbers: {got!r}") from None
    expect(made.shape == shape, f"{what} has the shape {made.shape}, and must have {shape}")
    return made


def close(got, right, size=1.0):
    """Whether float32 could come so near. NaN and infinities are equal to themselves."""
    return np.isclose(got, right, rtol=1e-4, atol=1e-5 * size, equal_nan=True)


def first_wrong(got, right):
    """The index of the first element that is wrong, or None."""
    wrong = np.argwhere(~close(got, right, max(1.0, np.abs(right[np.isfinite(right)]).max(initial=0))))
    return tuple(int(i) for i in wrong[0]) if len(wrong) else None
