"""Tile counters in device memory, for persistent kernels, whose blocks take their work from a counter.

A kernel leaves its counter at zero, as it found it, so consecutive launches share one: each stream has its own. A
launch that is captured in a graph gets its own counter, because a replay may run beside the stream's other work.
"""

import threading
from typing import Any

from .stream_numbers import number_of

WORDS, SPACING, SLAB = 2, 128, 4096  # uint32 words of a counter; bytes between two; number allocated at a time
_lock = threading.Lock()
_unused: dict[int, list[int]] = {}  # device -> addresses
_of_default: dict[int, int] = {}  # device -> counter of the legacy default stream, which cannot be captured
_of_stream: dict[tuple[int, int], int] = {}  # (device, a stream's number); the most recently used one is last


def counter(device: int, stream: int) -> int:
    """The address of the counter for a launch on `stream`."""
    if stream > 1:
        return _counter_of(device, stream)
    found = _of_default.get(device)
    if found is None:
        with _lock:
            found = _of_default[device] = _take(device)
    return found


def _counter_of(device: int, stream: int) -> int:
    number = number_of(device, stream)
    if number is None:
        with _lock:
            return _take(device)
    key = device, number
    with _lock:  # otherwise two threads on one stream would sometimes take a new counter
        found = _of_stream.pop(key, None)
        if found is None:
            if len(_of_stream) >= SLAB:
                _recycle()
            found = _take(device)
        _of_stream[key] = found
    return found


def prepare(device: int) -> None:
    """Makes counters available before the first launch, which may be captured."""
    with _lock:
        _fill(device)


# Call these with the lock held.


def _take(device: int) -> int:
    _fill(device)
    return _unused[device].pop()


def _fill(device: int) -> None:
    if not _unused.get(device):
        _unused[device] = _slab(device)


def _recycle() -> None:
    """Takes back the counter of the stream whose last launch is the longest ago: thousands of others had one since."""
    key = next(iter(_of_stream))
    _unused[key[0]].insert(0, _of_stream.pop(key))


def _slab(device: int) -> list[int]:
    """Addresses of zeroed counters. They are never freed: a stream or a graph may use them at any time."""
    from cuda.bindings import driver

    primary = _checked(driver.cuDevicePrimaryCtxRetain(device))
    _checked(driver.cuCtxPushCurrent(primary))
    # A stream may be captured meanwhile. Its graph must not depend on this allocation.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        memory = int(_checked(driver.cuMemAlloc(SLAB * SPACING)))
        stream = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _checked(driver.cuMemsetD8Async(memory, 0, SLAB * SPACING, stream))
        _checked(driver.cuStreamSynchronize(stream))
        _checked(driver.cuStreamDestroy(stream))
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(before))
        _checked(driver.cuCtxPopCurrent())
    return [memory + SPACING * i for i in range(SLAB)]


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise RuntimeError(f"this launch gets no tile counter: {result[0].name}")
    return result[1] if len(result) > 1 else None
