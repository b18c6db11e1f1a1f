"""Launching a kernel in Numba's CUDA simulator: memory that checks its bounds, one launch at a time."""

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..arrays import Array, host_view

_one_at_a_time = threading.Lock()  # a second launch beside a running one would be taken for a device call

SWITCH_INTERVAL = 1e-4  # s; Numba's barriers wait by polling, ten times cheaper so than at Python's 5 ms


class Pointer:
    """What a kernel sees of an array: an address that can be indexed, like a C pointer, but checked.

    Index 0 is the array's first element; with negative strides the others lie before it. bfloat16
    is shown as its 16 bits, as it is to the compiled kernel.
    """

    __slots__ = ("_first", "_flat", "array")

    def __init__(self, array: np.ndarray):
        self.array = array  # for a person in the debugger
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        elif array.dtype == bool:
            array = array.view(np.uint8)
        item = array.itemsize
        reach = [s // item * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)] if array.size else []
        low, high = sum(min(0, x) for x in reach), sum(max(0, x) for x in reach)
        start = (
            array[tuple(n - 1 if s < 0 else 0 for s, n in zip(array.strides, array.shape, strict=True))]
            if reach
            else None
        )
        self._first = -low
        if start is None:
            self._flat = np.empty(0, array.dtype)
        else:
            lowest = array
            for axis, stride in enumerate(array.strides):
                if stride < 0:
                    lowest = np.flip(lowest, axis)
            self._flat = np.lib.stride_tricks.as_strided(
                lowest, (high - low + 1,), (item,), writeable=array.flags.writeable
            )

    def __getitem__(self, index: int) -> Any:
        return self._flat[self._checked(index)]

    def __setitem__(self, index: int, value: Any) -> None:
        self._flat[self._checked(index)] = value

    def _checked(self, index: int) -> int:
        position = int(index) + self._first
        if not 0 <= position < self._flat.size:
            raise IndexError(f"element {index} lies outside of an array of shape {self.array.shape}")
        return position

    def __repr__(self) -> str:
        return f"Pointer to {self.array.dtype} {self.array.shape}\n{self.array}"


def run(
    kernel: Any, blocks: int, threads: int, shared_bytes: int, arrays: tuple[Array | None, ...], scalars: tuple
) -> None:
    """kernel: what @cuda.jit made in the simulator. Exceptions in it are raised here, with thread and block."""
    pointers = [None if array is None else Pointer(host_view(array)) for array in arrays]
    with _one_at_a_time, _fast_switching(), np.errstate(all="ignore"):
        kernel[blocks, threads, 0, shared_bytes](*pointers, *scalars)


@contextlib.contextmanager
def _fast_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def warn_if_long(seconds: float) -> None:
    if seconds > 60:
        warnings.warn(
            f"this will take about {seconds / 60:.0f} min in Numba's CUDA simulator, which runs every GPU thread "
            "as a Python thread; kernel='cpu' is fast",
            RuntimeWarning,
            stacklevel=4,
        )
