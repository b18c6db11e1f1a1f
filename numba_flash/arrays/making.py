"""New arrays of the caller's own library, scratch memory of any, and how they are handed over."""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .fast_path import cupy_maker, numpy_maker, torch_maker
from .layout import Array, Layout, contiguous_like, host_pointer, numpy_dtype
from .reading import as_bfloat16, is_transformed, read_jax, read_numba, read_numpy
from .recording import NeedsBridge
from .streams import LEGACY_DEFAULT, core_stream, current_stream


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """A new contiguous array of like's family on like's device."""
    layout = contiguous_like(like.layout, shape, dtype)
    make = _MAKERS.get(layout.family)
    if make is None:
        raise TypeError(
            f"q is a {type(like.owner).__module__}.{type(like.owner).__name__}, of which "
            "numba_flash cannot make new ones: pass out= (and with return_lse a pair out=(o, lse))"
        )
    return make(like, layout)


def _empty_numpy(like: Array, layout: Layout) -> Array:
    x = numpy_maker(like.layout, layout.shape, layout.dtype)(like.owner)
    return Array(host_pointer(x), layout, x, x)


def _empty_cupy(like: Array, layout: Layout) -> Array:
    x = cupy_maker(like.layout, layout.shape, layout.dtype)(like.owner)
    return Array(x.data.ptr, layout, x)


def _empty_torch(like: Array, layout: Layout) -> Array:
    x = torch_maker(like.layout, layout.shape, layout.dtype)(like.owner)
    try:
        return Array(x.data_ptr(), layout, x)
    except RuntimeError:
        if not is_transformed(x):
            raise
        raise NeedsBridge("torch.func transforms whatever is made here", "torch") from None


def _empty_numba(like: Array, layout: Layout) -> Array:
    from numba import cuda

    with cuda.gpus[layout.device]:
        return read_numba(cuda.device_array(layout.shape, numpy_dtype(layout.dtype)))


def _empty_jax(like: Array, layout: Layout) -> Array:
    if layout.device is not None:
        return scratch(like, layout.shape, layout.dtype)
    return read_numpy(aligned_memory(layout.shape, numpy_dtype(layout.dtype)))


_MAKERS: dict[str, Callable[[Array, Layout], Array]] = dict(
    numpy=_empty_numpy, cupy=_empty_cupy, torch=_empty_torch, numba=_empty_numba, jax=_empty_jax
)


def empty_for(stream: int, like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """`empty` for work on this stream. CuPy and torch hand memory out for work on their current stream, which it may
    still serve, and hand it out again as soon as nobody holds it."""
    layout = like.layout
    if layout.device is None or layout.family not in ("cupy", "torch"):
        return empty(like, shape, dtype)
    if (stream or LEGACY_DEFAULT) == (current_stream(like) or LEGACY_DEFAULT):
        return empty(like, shape, dtype)
    with _library_on(like, stream):
        return empty(like, shape, dtype)


def scratch(like: Array, shape: tuple[int, ...], dtype: str, stream: int = 0) -> Array:
    """New memory beside `like` that no caller gets to see as such: any family has it. `stream` is where it is used, and
    what is enqueued there is done before another gets the memory."""
    if like.layout.family in ("numpy", "cupy", "torch"):
        return empty_for(stream, like, shape, dtype)
    from cuda.core import Device
    from cuda.core.utils import StridedMemoryView

    device = Device(like.layout.device or 0)
    device.set_current()
    # cuda.core exports no bfloat16 by DLPack: there it is called int16, which no array here is, until _Handover says so
    known_dtype = numpy_dtype("int16" if dtype == "bfloat16" else dtype)
    size = math.prod(shape) * known_dtype.itemsize
    buffer = device.allocate(max(size, 1), stream=core_stream(stream))  # also the stream that frees it
    view = StridedMemoryView.from_buffer(buffer, shape, itemsize=known_dtype.itemsize, dtype=known_dtype)
    return Array(int(buffer.handle), like.layout, buffer, view)


@contextlib.contextmanager
def _library_on(like: Array, stream: int) -> Iterator[None]:
    """Makes this the current stream of CuPy or torch."""
    device = like.layout.device
    if like.layout.family == "cupy":
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device), _cupy_stream(stream) if stream > LEGACY_DEFAULT else cuda.Stream.null:
            yield
    else:
        cuda = sys.modules["torch"].cuda
        known = cuda.ExternalStream(stream, device) if stream > LEGACY_DEFAULT else cuda.default_stream(device)
        with cuda.stream(known):
            yield


def _cupy_stream(address: int) -> Any:
    """CuPy's object for a stream that belongs to somebody else."""
    # Past ExternalStream's own __init__, which warns since CuPy 14 that Stream.from_external is to be used: CuPy 13 has
    # no such thing, and it gives an object of the class that destroys its stream.
    external = sys.modules["cupy"].cuda.ExternalStream
    made = external.__new__(external)
    super(external, made).__init__(address, -1)  # of the device that is current
    return made


def note_writing(*written: Array | None) -> None:
    """Runs before the caller's arrays are written: torch then notices if autograd saved their old values."""
    for array in written:
        if array is not None and array.layout.family == "torch":
            _increment_version()(array.owner)


@functools.cache
def _increment_version() -> Callable[[Any], None]:
    return sys.modules["torch"].autograd.graph.increment_version


def give(like: Array, array: Array) -> Any:
    """The object to hand to the caller for an array that `empty` made."""
    if like.layout.family != "jax" or isinstance(array.owner, type(like.owner)):
        return array.owner
    if array.layout.device is None:
        return _put(array.owner, like.owner)
    return sys.modules["jax"].dlpack.from_dlpack(_Handover(array))


def _put(x: np.ndarray, like: Any) -> Any:
    """x as a JAX array on the device of `like`, and committed to it if `like` is. Aligned memory is taken over;
    jax.numpy.asarray would copy it."""
    jax = sys.modules["jax"]
    (device,) = like.devices()
    if like.committed:
        return jax.device_put(x, device)
    with jax.default_device(device):
        return jax.device_put(x)


def beside_jax(q: Array, options: list[Array | None]) -> list[Array | None]:
    """The options of a call with a JAX array as q, with JAX's in the place of NumPy's: JAX programs mix them, and their
    constants are NumPy's. JAX's rules say which dtype they get."""
    return [read_jax(_put(x.owner, q.owner)) if x is not None and x.layout.family == "numpy" else x for x in options]


class _Handover:
    """Device memory for another library by DLPack, which says on what stream that library will use it."""

    def __init__(self, array: Array):
        self._view = array.view

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream is not None and stream > 2:  # else it is the default stream, where the work is
            from cuda.core import LEGACY_DEFAULT_STREAM, Stream

            Stream.from_handle(stream).wait(LEGACY_DEFAULT_STREAM)
        capsule = self._view.__dlpack__(stream=-1, **options)
        return as_bfloat16(capsule) if self._view.dtype == np.int16 else capsule


def aligned_memory(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """Memory aligned as JAX wants it, so that it takes the array over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)
