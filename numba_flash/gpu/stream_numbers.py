"""Identifies the stream of a handle, for what is kept for the work on one stream."""

from typing import Any

from ..machine import context

LEGACY_DEFAULT = 0


def number_of(device: int, stream: int) -> int | None:
    """The number of a stream, which is never reused; None while the stream is being captured, when nothing runs.

    Handles are reused: that of a stream that was destroyed while its work goes on, and in each thread that of the
    thread's own default stream. Numbers are not. The legacy default stream cannot be captured; here it is 0.
    """
    if stream <= 1:
        return LEGACY_DEFAULT
    from cuda.bindings import driver

    error, status = driver.cuStreamIsCapturing(stream)
    if error:  # this may be the thread's first use of CUDA
        context.ensure(device)
        status = checked(driver.cuStreamIsCapturing(stream))
    if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return None
    return int(checked(driver.cuStreamGetId(stream)))


def checked(result: tuple[Any, ...]) -> Any:
    if result[0]:
        raise RuntimeError(f"CUDA does not say which stream this is: {result[0].name}")
    return result[1] if len(result) > 1 else None
