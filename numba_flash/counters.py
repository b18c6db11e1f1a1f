"""Tile counters in device memory, for kernels whose blocks stay and take their work by counting.

A kernel leaves its counter as it found it, zero, so launches that follow each other share one: each stream has its
own. A launch that is captured in a graph gets one for itself, because a replay may run beside its stream's own work.
"""

import threading
from typing import Any

from .arrays import Array

WORDS, SPACING, SLAB = 2, 128, 4096  # uint32 words of a counter; bytes between two; how many are made at a time
_lock = threading.Lock()
_unused: dict[int, list[int]] = {}  # device -> addresses
_of_stream: dict[tuple[int, int], Array] = {}


def counter(like: Array, device: int, stream: int) -> Array:
    """The counter for a launch on `stream`, next to the array `like`."""
    if stream > 2:  # else one of the default streams, which cannot be captured
        from cuda.bindings import driver

        _, status = driver.cuStreamIsCapturing(stream)
        if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
            return Array(_take(device), like.layout, None)
    found = _of_stream.get((device, stream))
    if found is None:
        found = _of_stream[device, stream] = Array(_take(device), like.layout, None)
    return found


def prepare(device: int) -> None:
    """Have counters at hand: while a graph is captured no memory can be allocated."""
    with _lock:
        if not _unused.get(device):
            _unused[device] = _slab(device)


def _take(device: int) -> int:
    prepare(device)
    with _lock:
        return _unused[device].pop()


def _slab(device: int) -> list[int]:
    """Addresses of zeroed counters. They are never freed: a stream or a graph may use them at any time."""
    from cuda.bindings import driver

    context = _checked(driver.cuDevicePrimaryCtxRetain(device))
    _checked(driver.cuCtxPushCurrent(context))
    try:
        memory = int(_checked(driver.cuMemAlloc(SLAB * SPACING)))
        _checked(driver.cuMemsetD8(memory, 0, SLAB * SPACING))
        _checked(driver.cuCtxSynchronize())
    finally:
        _checked(driver.cuCtxPopCurrent())
    return [memory + SPACING * i for i in range(SLAB)]


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise RuntimeError(f"the tile counters could not be allocated: {result[0].name}")
    return result[1] if len(result) > 1 else None
