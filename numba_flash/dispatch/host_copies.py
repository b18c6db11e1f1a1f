"""Runs a GPU kernel that was asked for by name on NumPy arrays: copies them there and back, and waits.

numba_flash copies arrays only here, and `explain` says so.
"""

from typing import Any

import numpy as np

from .. import arrays
from ..arrays import Array, Layout
from ..problem.options import Operands
from .launch import Given, Launch

WRITTEN = (Operands._fields.index("o"), Operands._fields.index("lse"))


def layout_of_copy(host: Layout) -> Layout:
    """The layout of the copy that `ThroughGpu` makes of an array."""
    return arrays.contiguous_layout("foreign", 0, host.shape, host.dtype)


def layouts_of_copies(layouts: tuple[Layout | None, ...]) -> tuple[Layout | None, ...]:
    return tuple([None if layout is None else layout_of_copy(layout) for layout in layouts])


class ThroughGpu(Launch):
    """A launch on device 0 for operands in host memory, with copies of them."""

    __slots__ = ("_there",)

    def __init__(self, there: Launch) -> None:
        self._there = there

    def load(self) -> None:
        self._there.load()

    def run(self, operands: Given, stream: int) -> None:
        work_on = _default_stream()
        copies = [
            _copy_of(array, work_on, upload=n not in WRITTEN) if isinstance(array, Array) else array
            for n, array in enumerate(operands)
        ]
        self._there.run(copies, 0)
        for n in WRITTEN:
            array, copy = operands[n], copies[n]
            if array is not None and copy is not None:
                result = np.empty(array.layout.shape, arrays.host_view(array).dtype)
                arrays.move(result.ctypes.data, copy.pointer, result.nbytes, work_on)
                arrays.host_view(array)[...] = result


def _default_stream() -> Any:
    """The default stream of device 0, which becomes the current device."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Device

    Device(0).set_current()
    return LEGACY_DEFAULT_STREAM


def _copy_of(array: Array, stream: Any, upload: bool) -> Array:
    host = np.ascontiguousarray(arrays.host_view(array))
    buffer = _memory(max(host.nbytes, 1), stream)
    pointer = int(buffer.handle)
    if upload:
        arrays.move(pointer, host.ctypes.data, host.nbytes, stream)
    return Array(pointer, layout_of_copy(array.layout), buffer)


def _memory(size: int, stream: Any) -> Any:
    from cuda.core import Device

    return Device().allocate(size, stream=stream)
