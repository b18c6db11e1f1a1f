"""Numbers with NumPy's types, at a quarter of the cost of a call of the type."""

from typing import Any

import numpy as np


def converter(kind: Any) -> Any:
    """-> a function that does the same as NumPy's type in a quarter of the time. As a dtype it is that type."""
    room = np.empty(1, kind)
    is_real = issubclass(kind, np.floating)
    least, most = (-1024, 8192) if is_real else (np.iinfo(kind).min, np.iinfo(kind).max)
    small = {x: kind(x) for x in range(max(least, -1024), min(most, 8192))}  # nearly all that kernels convert

    def convert(x: Any) -> Any:
        if type(x) is kind:
            return x
        if not is_real or type(x) is int:  # -0.0 would be found as 0
            try:
                return small[x]
            except KeyError:
                pass
        try:
            room[0] = x
        except OverflowError:  # a call wraps NumPy's numbers around, and not Python's
            return kind(x)
        return room[0]

    convert.dtype = room.dtype  # type: ignore[attr-defined]
    return convert


int32, uint32 = converter(np.int32), converter(np.uint32)
