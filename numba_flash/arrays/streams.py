"""The stream that a call works on, and what it waits for."""

import sys
from collections.abc import Sequence
from typing import Any

from ..machine import context
from .layout import Array

LEGACY_DEFAULT = 1  # the address of this stream, which is also called 0


def stream_of(given: Sequence[Array | None], stream: Any) -> int:
    """The address of the stream to work on: the given one, or the one that the first array's family is working on.

    It waits for the producers of all these arrays. 0 is the legacy default stream; arrays in host memory have none.
    """
    like = given[0]
    assert like is not None
    if like.layout.device is None:
        return 0
    address = current_stream(like) if stream is None else address_of(stream)
    if like.layout.family not in ("cupy", "torch"):  # their own work is on the current stream
        _wait_for_producers(given, like.layout.device, address or LEGACY_DEFAULT)
    return address


def _wait_for_producers(given: Sequence[Array | None], device: int, address: int) -> None:
    streams = {array.after or LEGACY_DEFAULT for array in given if array is not None and array.after is not None}
    others = sorted(streams - {address})
    if others:
        context.ensure(device)
    for other in others:
        core_stream(address).wait(core_stream(other))


def core_stream(address: int) -> Any:
    """The stream as cuda.core knows it."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(address) if address > LEGACY_DEFAULT else LEGACY_DEFAULT_STREAM


def move(destination: int, origin: int, size: int, stream: Any) -> None:
    """Copy bytes between host and GPU, behind what is enqueued on this stream of cuda.core's, and wait for them."""
    from cuda.bindings import driver

    if not size:
        return
    (error,) = driver.cuMemcpyAsync(destination, origin, size, int(stream.handle))
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"a copy of {size} bytes between host and GPU failed: {error.name}")
    stream.sync()  # the host's bytes may go away, or be read or written next


def current_stream(like: Array) -> int:
    family, device = like.layout.family, like.layout.device
    if family == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr
    if family == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)  # without making a Stream of it
    return like.after or 0


def address_of(stream: Any) -> int:
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        if isinstance(getattr(stream, attribute, None), int):
            return getattr(stream, attribute)
    if hasattr(stream, "__cuda_stream__"):
        return stream.__cuda_stream__()[1]
    handle = getattr(stream, "handle", None)  # numba
    if handle is not None:
        return int(getattr(handle, "value", handle) or 0)
    raise TypeError(
        "stream must be a stream of CuPy, torch, Numba or cuda.core, anything with __cuda_stream__, or "
        f"an address, not {type(stream).__name__}"
    )
