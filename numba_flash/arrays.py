"""Foreign arrays in, outputs out: NumPy, CuPy, Numba, torch, JAX, DLPack, CUDA Array Interface.

`read` turns what the caller handed over into an address and a `Layout`, without a copy and without
waiting for the device. No framework is imported here that the caller did not import: an array's own
type names its family, and the family's module is then in sys.modules already. No attention words.
"""

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Layout(NamedTuple):
    """What an array is, apart from where its bytes lie: hashable, so that a checked problem is found again."""

    family: str  # "numpy", "cupy", "numba", "torch", "jax", or "foreign" for a bare protocol
    device: int | None  # CUDA device, None = host memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in units of `unit` bytes, as the family counts them
    unit: int
    dtype: str
    readonly: bool


class Array(NamedTuple):
    """An array as the rest of the package sees it."""

    pointer: int
    layout: Layout
    owner: Any  # the object that came in; keeps the memory alive
    view: Any = None  # a view of it that NumPy or cuda.core made, where one was needed


DTYPES = {"float16", "bfloat16", "float32", "float64"}
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int32": 4}


def _numpy(x: Any) -> Array:
    interface = x.__array_interface__
    pointer, readonly = interface["data"]
    return Array(pointer, Layout("numpy", None, x.shape, x.strides, 1, _numpy_name(x.dtype), readonly), x)


def _numpy_name(dtype: np.dtype) -> str:
    # A foreign byte order is another type altogether: ">f4" must not pass as float32.
    return dtype.name if dtype.isnative else dtype.str


def _cupy(x: Any) -> Array:
    data = x.data
    return Array(data.ptr, Layout("cupy", data.device_id, x.shape, x.strides, 1, _numpy_name(x.dtype), False), x)


def _torch(x: Any) -> Array:
    torch = sys.modules["torch"]
    if x.layout is not torch.strided or x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"a torch tensor must be dense and on the CPU or a CUDA device, not {x.layout} on {x.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "a torch tensor that requires grad was given; gradients are not there yet, and detaching it "
            "in silence would lose them: call attention under torch.no_grad(), or pass tensor.detach()"
        )
    device = (x.device.index or 0) if x.device.type == "cuda" else None
    dtype = str(x.dtype).removeprefix("torch.")
    return Array(x.data_ptr(), Layout("torch", device, tuple(x.shape), x.stride(), x.element_size(), dtype, False), x)


def _jax(x: Any) -> Array:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise NotImplementedError("a traced JAX array was given; attention cannot run inside jax.jit or jax.grad yet")
    if next(iter(x.devices())).platform == "cpu":
        host = np.asarray(x)  # a view: JAX's host buffers are NumPy's to read
        return Array(host.__array_interface__["data"][0], _numpy(host).layout._replace(family="jax"), x, host)
    array = _cuda_interface(x)
    return Array(array.pointer, array.layout._replace(family="jax", readonly=True), x)


def _cuda_interface(x: Any) -> Array:
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise NotImplementedError("an array with a mask in its CUDA Array Interface was given; unmask it first")
    pointer, readonly = interface["data"]
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = _contiguous_strides(shape, dtype.itemsize)
    name = _numpy_name(np.dtype(getattr(x, "dtype", dtype)))  # typestr cannot say bfloat16, a dtype can
    return Array(pointer, Layout("foreign", _device_of(pointer), shape, tuple(strides), 1, name, readonly), x)


def _numba(x: Any) -> Array:
    array = _cuda_interface(x)
    return Array(array.pointer, array.layout._replace(family="numba"), x)


def _dlpack(x: Any) -> Array:
    if x.__dlpack_device__()[0] == 1:  # kDLCPU
        host = np.from_dlpack(x)
        return Array(host.__array_interface__["data"][0], _numpy(host).layout._replace(family="foreign"), x, host)
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(x, stream_ptr=1)  # ordered on the legacy default stream
    dtype = np.dtype(view.dtype)
    strides = view.strides or _contiguous_strides(tuple(view.shape), 1)
    layout = Layout(
        "foreign", view.device_id, tuple(view.shape), tuple(strides), dtype.itemsize, dtype.name, view.readonly
    )
    return Array(view.ptr, layout, x, view)


def _contiguous_strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides = [unit]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    return tuple(strides[: len(shape)])


def _device_of(pointer: int) -> int:
    """Which CUDA device an address belongs to; an empty array has none and counts as device 0."""
    if not pointer:
        return 0
    from cuda.bindings import driver

    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    error, ordinal = driver.cuPointerGetAttribute(attribute, pointer)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(f"the array's address {pointer:#x} is not memory of a CUDA device ({error.name})")
    return int(ordinal)


_READERS: dict[type, Callable[[Any], Array]] = {np.ndarray: _numpy}


def read(name: str, x: Any) -> Array:
    """The address and layout of argument `name`."""
    reader = _READERS.get(type(x))
    if reader is None:
        reader = _READERS[type(x)] = _reader_for(name, x)
    try:
        return reader(x)
    except (TypeError, NotImplementedError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from None


def _reader_for(name: str, x: Any) -> Callable[[Any], Array]:
    package = type(x).__module__.partition(".")[0]
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; pass its data and, if that is meant, mask=")
    if isinstance(x, np.ndarray):
        return _numpy
    if package == "cupy" and hasattr(x, "__cuda_array_interface__"):
        return _cupy
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        return _torch
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        return _jax
    if package in ("numba", "numba_cuda") and hasattr(x, "__cuda_array_interface__"):
        return _numba
    if hasattr(x, "__cuda_array_interface__"):
        return _cuda_interface
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack
    raise TypeError(
        f"{name} must be an array (NumPy, CuPy, torch, JAX, Numba's device arrays, or anything with "
        f"__dlpack__ or __cuda_array_interface__), not {type(x).__name__}"
    )


def empty(like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """A new contiguous array of like's family on like's device."""
    family, device = like.layout.family, like.layout.device
    if family == "numpy":
        return _numpy(np.empty(shape, _numpy_dtype(dtype)))
    if family == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(device):
            return _cupy(cupy.empty(shape, _numpy_dtype(dtype)))
    if family == "torch":
        torch = sys.modules["torch"]
        return _torch(torch.empty(shape, dtype=getattr(torch, dtype), device=like.owner.device))
    if family == "numba":
        from numba import cuda

        with cuda.gpus[device]:
            return _numba(cuda.device_array(shape, _numpy_dtype(dtype)))
    if family == "jax" and device is None:
        return _numpy(_aligned(shape, _numpy_dtype(dtype)))
    raise TypeError(
        f"q is a {type(like.owner).__module__}.{type(like.owner).__name__}, of which "
        "numba_flash cannot make new ones: pass out= (and with return_lse a pair out=(o, lse))"
    )


def give(like: Array, array: Array) -> Any:
    """The object to hand to the caller for an array that `empty` made."""
    if like.layout.family == "jax":
        return sys.modules["jax"].numpy.asarray(array.owner)
    return array.owner


def _numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def _aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """Memory aligned as JAX wants it, so that it takes the array over without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def host_view(array: Array) -> np.ndarray:
    """A NumPy array over the same host memory, whatever the family; writes go through."""
    for known in (array.view, array.owner):
        if isinstance(known, np.ndarray):
            return known
    layout = array.layout
    dtype = _numpy_dtype(layout.dtype)
    strides = tuple(s * layout.unit for s in layout.strides)
    low = sum(min(0, s * (n - 1)) for s, n in zip(strides, layout.shape, strict=True) if n)
    high = sum(max(0, s * (n - 1)) for s, n in zip(strides, layout.shape, strict=True) if n) + dtype.itemsize
    if 0 in layout.shape:
        return np.empty(layout.shape, dtype)
    memory = (ctypes.c_char * (high - low)).from_address(array.pointer + low)
    flat = np.frombuffer(memory, np.uint8)
    view = np.ndarray(layout.shape, dtype, flat, -low, strides)
    view.flags.writeable = not layout.readonly
    return view


def is_array(x: Any) -> bool:
    """Whether x is an array rather than a plain number (NumPy's scalars are numbers)."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


def stream_of(like: Array, stream: Any) -> int:
    """The address of the stream to work on: the given one, or the one like's family is working on.

    0 is the legacy default stream; arrays in host memory have no stream.
    """
    if like.layout.device is None:
        return 0
    return _current_stream(like) if stream is None else _stream_address(stream)


def _current_stream(like: Array) -> int:
    family, device = like.layout.family, like.layout.device
    if family == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr
    if family == "torch":
        return sys.modules["torch"].cuda.current_stream(device).cuda_stream
    if hasattr(like.owner, "__cuda_array_interface__"):
        return like.owner.__cuda_array_interface__.get("stream") or 0
    return 0


def _stream_address(stream: Any) -> int:
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
