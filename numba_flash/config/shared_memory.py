"""Where the parts of a block's shared memory begin, by name."""

import collections
import functools
import itertools
from typing import Any


def places(**starts: int) -> Any:
    """A NamedTuple of these numbers, which a kernel reads as constants."""
    return _type(tuple(starts))(**starts)


def layout(step: int = 1, **sizes: int) -> Any:
    """Parts that follow each other: a NamedTuple of where each of them begins, and `end`. A part takes a multiple of
    `step`."""
    starts = itertools.accumulate((-(-size // step) * step for size in sizes.values()), initial=0)
    return places(**dict(zip((*sizes, "end"), starts, strict=True)))


@functools.cache
def _type(names: tuple[str, ...]) -> Any:
    return collections.namedtuple("Places", names)  # type: ignore[misc]
