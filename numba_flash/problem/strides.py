"""The strides of an array, in elements, as every later part takes them."""

import math

from ..arrays import ITEM_SIZE, Layout

Strides = tuple[int, int, int, int]


def check_strides(name: str, array: Layout) -> None:
    size = ITEM_SIZE.get(array.dtype, 1)
    if any(s * array.unit % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        strides = tuple(s * array.unit for s in array.strides)
        words = f"{name} has strides {strides} in bytes, which are not multiples of its {size}-byte elements"
        raise ValueError(f"{words}: copy it")


def element_strides(array: Layout) -> tuple[int, ...]:
    """Strides in elements. A dimension of one element gets stride 0, because it is never stepped along."""
    size = ITEM_SIZE[array.dtype]
    return tuple(s * array.unit // size if n > 1 else 0 for s, n in zip(array.strides, array.shape, strict=True))


def axes_strides(strides: tuple[int, ...], order: tuple[int, ...]) -> Strides:
    """Puts strides in the order (batch, head, seqlen, dim). `order` has the indices of these in `strides`. Packed
    sequences have no batch, and 3 strides."""
    every = (0,) * (4 - len(strides)) + strides
    return (every[order[0]], every[order[1]], every[order[2]], every[order[3]])


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a C-contiguous array, by the same rule as `element_strides`."""
    return tuple(math.prod(shape[axis + 1 :]) if extent > 1 else 0 for axis, extent in enumerate(shape))
