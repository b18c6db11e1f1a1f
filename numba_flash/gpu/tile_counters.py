"""Counters in device memory: of persistent kernels, whose blocks take their work from one, and of blocks that wait for
the last of them.

A kernel leaves its counters at zero, as it found them, so consecutive launches share one: each stream has its own. A
launch that is captured in a graph gets its own counter, because a replay may run beside the stream's other work.
"""

import threading
from typing import Any

from .stream_numbers import number_of

WORDS = 2  # uint32 of a tile counter
SPACING, SLAB, STREAMS = 128, 1 << 19, 4096  # bytes of the least counters; bytes allocated at a time; streams at most
_lock = threading.Lock()
_unused: dict[tuple[int, int], list[int]] = {}  # (device, bytes) -> addresses
_of_default: dict[tuple[int, int], int] = {}  # likewise, of the legacy default stream, which cannot be captured
_of_stream: dict[tuple[int, int, int], int] = {}  # and a stream's number; the most recently used one is last


def counter(device: int, stream: int, words: int = WORDS) -> int:
    """The address of so many words for a launch on `stream`."""
    size = _size(words)
    if stream > 1:
        return _counter_of(device, stream, size)
    found = _of_default.get((device, size))
    if found is None:
        with _lock:
            found = _of_default[device, size] = _take(device, size)
    return found


def _size(words: int) -> int:
    """The bytes of a counter. There are few such sizes."""
    return max(SPACING, 4 * (1 << (words - 1).bit_length()))


def _counter_of(device: int, stream: int, size: int) -> int:
    number = number_of(device, stream)
    if number is None:
        with _lock:
            return _take(device, size)
    key = device, size, number
    with _lock:  # otherwise two threads on one stream would sometimes take a new counter
        found = _of_stream.pop(key, None)
        if found is None:
            if len(_of_stream) >= STREAMS:
                _recycle()
            found = _take(device, size)
        _of_stream[key] = found
    return found


def prepare(device: int, words: int = WORDS) -> None:
    """Makes counters available before the first launch, which may be captured."""
    with _lock:
        _fill(device, _size(words))


# Call these with the lock held.


def _take(device: int, size: int) -> int:
    _fill(device, size)
    return _unused[device, size].pop()


def _fill(device: int, size: int) -> None:
    if not _unused.get((device, size)):
        _unused[device, size] = _slab(device, size)


def _recycle() -> None:
    """Takes back the counter of the stream whose last launch is the longest ago: thousands of others had one since."""
    device, size, number = next(iter(_of_stream))
    _unused.setdefault((device, size), []).insert(0, _of_stream.pop((device, size, number)))


def _slab(device: int, size: int) -> list[int]:
    """Addresses of zeroed counters. They are never freed: a stream or a graph may use them at any time."""
    from cuda.bindings import driver

    primary = _checked(driver.cuDevicePrimaryCtxRetain(device))
    _checked(driver.cuCtxPushCurrent(primary))
    # A stream may be captured meanwhile. Its graph must not depend on this allocation.
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _checked(driver.cuThreadExchangeStreamCaptureMode(relaxed))
    try:
        memory = int(_checked(driver.cuMemAlloc(max(SLAB, size))))
        stream = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _checked(driver.cuMemsetD8Async(memory, 0, max(SLAB, size), stream))
        _checked(driver.cuStreamSynchronize(stream))
        _checked(driver.cuStreamDestroy(stream))
    finally:
        _checked(driver.cuThreadExchangeStreamCaptureMode(before))
        _checked(driver.cuCtxPopCurrent())
    return [memory + size * i for i in range(max(SLAB // size, 1))]


def _checked(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise RuntimeError(f"this launch gets no tile counter: {result[0].name}")
    return result[1] if len(result) > 1 else None
