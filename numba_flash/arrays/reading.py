"""`read`: an array of any library as an Array. An array's own type names its family."""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .fast_path import NUMPY, FastPath, of_cupy, of_torch
from .layout import (
    CUPY_LAYOUTS,
    LAYOUTS_OF,
    NUMPY_LAYOUTS,
    TORCH_LAYOUTS,
    Array,
    host_pointer,
    numpy_dtype,
    strides_of_contiguous,
)
from .recording import NeedsBridge, refuse_jax_tracer, torch_check, torch_differentiates
from .streams import LEGACY_DEFAULT


def read_numpy(x: Any) -> Array:
    facts = NUMPY_LAYOUTS[None, x.shape, x.strides, 1, x.dtype, not x.flags.writeable]
    return Array(host_pointer(x), facts, x)


def _cupy(x: Any) -> Array:
    data = x.data
    return Array(data.ptr, CUPY_LAYOUTS[data.device_id, x.shape, x.strides, 1, x.dtype, False], x)


def _torch(x: Any) -> Array:
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise NeedsBridge(
            "a torch tensor that requires grad was given, and here its gradient would be lost: call this under "
            "torch.no_grad(), or pass tensor.detach()",
            "torch",
        )
    try:
        pointer, strides = x.data_ptr(), None if x.is_contiguous() else x.stride()
        if x.is_neg() or (not pointer and x.numel()):
            if x.is_meta:
                raise TypeError(
                    "a torch tensor on the meta device has no numbers; compat.torch.scaled_dot_product_attention gives "
                    "the shape of its result"
                )
            raise TypeError(
                "a torch tensor must have its own numbers in memory, not those of another one, negated (pass "
                "tensor.resolve_neg()), or none, as in torch.func.functionalize"
            )
        return Array(pointer, TORCH_LAYOUTS[x.device, x.shape, strides, x.dtype], x)
    except RuntimeError as error:  # only a dense tensor has an address and strides
        if is_transformed(x):
            raise NeedsBridge(
                "a tensor was given that torch.func transforms, which has no address; only attention() goes through "
                "torch.func (grad, vjp, jacrev, vmap)",
                "torch",
            ) from None
        if sys.modules["torch"]._C._functorch.is_legacy_batchedtensor(x):
            raise NotImplementedError(
                "a tensor was given as torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) make "
                "them, by a vmap that no function of ours can take part in; use torch.func.vjp with vmap, or jacrev"
            ) from None
        if x.is_nested:
            raise TypeError(NESTED) from error
        if x.layout is sys.modules["torch"].strided and (x.is_cuda or x.is_cpu):
            raise
        raise TypeError(
            f"a torch tensor must be dense and on the CPU or a CUDA device, not {x.layout} on {x.device}"
        ) from error


def is_transformed(x: Any) -> bool:
    return sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(x)


NESTED = "a torch tensor must not be nested; pass torch.nested.to_padded_tensor(...), or its rows to attention_varlen"


def _torch_dispatching(x: Any) -> Array:
    if x.is_nested:
        raise TypeError(NESTED)
    raise NeedsBridge(f"a {type(x).__name__} was given, a torch tensor without an address of its own", "torch")


def read_jax(x: Any) -> Array:
    refuse_jax_tracer(x)
    device, *others = x.devices()
    if others:
        raise NeedsBridge(
            "a JAX array that is on several devices was given, which only attention() takes: call this inside "
            "jax.shard_map",
            "jax",
        )
    if device.platform != "cpu":
        return _dlpack(x, "jax")
    host = np.asarray(x)  # a view: JAX's host buffers are NumPy's to read
    facts = LAYOUTS_OF["jax"][None, host.shape, host.strides, 1, host.dtype, True]
    return Array(host_pointer(host), facts, x, host)


def _jax_buffer(x: Any) -> Array:
    """Reads an array that JAX hands to a callback: memory of XLA's, also for results."""
    if x.__dlpack_device__()[0] != 1:  # kDLCPU
        return _cuda_interface(x, "jax")
    host = np.asarray(x)
    facts = LAYOUTS_OF["jax"][None, host.shape, host.strides, 1, host.dtype, not host.flags.writeable]
    return Array(host_pointer(host), facts, x, host)


def jax_addresses(buffers: Sequence[Any]) -> tuple[list[int], int | None]:
    """The addresses of the buffers of one JAX callback, and their CUDA device, which is None for host memory.

    A callback knows their shapes and dtypes. `read`, which asks for those, takes three times as long.
    """
    if buffers[0].__dlpack_device__()[0] == 1:  # kDLCPU
        return [host_pointer(x.__array__()) for x in buffers], None
    pointers = [x.__cuda_array_interface__["data"][0] for x in buffers]
    return pointers, _device_of(max(pointers))  # an empty array has no address


def _cuda_interface(x: Any, family: str = "foreign") -> Array:
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise NotImplementedError("an array with a mask in its CUDA Array Interface was given; unmask it first")
    pointer, readonly = interface["data"]
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = strides_of_contiguous(shape, dtype.itemsize)
    dtype = np.dtype(getattr(x, "dtype", dtype))  # typestr cannot say bfloat16, a dtype can
    facts = LAYOUTS_OF[family][_device_of(pointer), shape, tuple(strides), 1, dtype, readonly]
    after = None if family == "jax" else interface.get("stream")  # XLA calls back when all is ready
    return Array(pointer, facts, x, after=after)


def read_numba(x: Any) -> Array:
    return _cuda_interface(x, "numba")


def _dlpack(x: Any, family: str = "foreign") -> Array:
    if x.__dlpack_device__()[0] == 1:  # kDLCPU
        bits = _Bits(x)
        host = np.from_dlpack(bits)
        host = host.view(numpy_dtype("bfloat16")) if bits.bfloat16 else host
        facts = LAYOUTS_OF[family][None, host.shape, host.strides, 1, host.dtype, not host.flags.writeable]
        return Array(host_pointer(host), facts, x, host)
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(x, stream_ptr=LEGACY_DEFAULT)  # that stream then waits for the producer
    dtype = np.dtype(view.dtype)
    strides = view.strides or strides_of_contiguous(tuple(view.shape), 1)
    readonly = view.readonly or family == "jax"
    facts = LAYOUTS_OF[family][view.device_id, tuple(view.shape), tuple(strides), dtype.itemsize, dtype, readonly]
    return Array(view.ptr, facts, x, view, LEGACY_DEFAULT)


class DLDataType(ctypes.Structure):
    """The type of this name in dlpack.h."""

    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


INT, BFLOAT = 0, 4  # values of its code


def as_bfloat16(capsule: Any) -> Any:
    """A DLPack capsule of int16 as one of bfloat16."""
    dtype_of(capsule).code = BFLOAT
    return capsule


def dtype_of(capsule: Any) -> DLDataType:
    """The dtype in a DLPack capsule, which may be written: 20 bytes from the beginning of the DLTensor, which is that
    of the capsule or, since version 1.0, 32 bytes behind it."""
    # Prototypes of our own: ctypes.pythonapi's functions are shared by everyone in the process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    name = name_of(capsule)
    tensor = pointer_of(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    return DLDataType.from_address(tensor + 20)


class _Bits:
    """An array by DLPack for NumPy, which knows no bfloat16 there and gets it as int16."""

    def __init__(self, x: Any):
        self.x, self.bfloat16 = x, False

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.x.__dlpack__(**options)
        dtype = dtype_of(capsule)
        self.bfloat16 = (dtype.code, dtype.bits) == (BFLOAT, 16)
        if self.bfloat16:
            dtype.code = INT
        return capsule


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


_READERS: dict[type, Callable[[Any], Array]] = {np.ndarray: read_numpy}
# family -> a function to call with all arrays of a call, once they are read. It raises NeedsBridge if the family's
# library records every operation, by other means than its arrays. It is there from the family's first array on.
checks: dict[str, Callable[[Sequence[Array | None]], None]] = {}
# type of q -> whether its library differentiates a call with these q, k and v. `read` finds out too, by an exception
# that takes 3 to 8 us.
differentiated: dict[type, Callable[[Any, Any, Any], bool]] = {}


class _FastPaths(dict):
    """type of an array -> its FastPath or None. Subscripting one that was seen costs no function call."""

    def __missing__(self, kind: type) -> FastPath | None:
        found, package = None, kind.__module__.partition(".")[0]
        if package == "cupy" and kind is sys.modules["cupy"].ndarray:  # not a subclass
            found = of_cupy()
        if package == "torch" and kind in (sys.modules["torch"].Tensor, sys.modules["torch"].nn.Parameter):
            found = of_torch()
        return self.setdefault(kind, found)


fast_paths: dict[type, Any] = _FastPaths({np.ndarray: NUMPY})


def read(name: str, x: Any) -> Array:
    """The address and layout of argument `name`."""
    reader = _READERS.get(type(x))
    if reader is None:
        reader = _READERS[type(x)] = _reader_for(name, x)
    try:
        return reader(x)
    except Exception as error:
        by_protocol = reader in (_dlpack, _cuda_interface)  # an object of a library that nobody knows here
        if by_protocol and not isinstance(error, TypeError | NotImplementedError | ValueError):
            raise TypeError(f"{name}: {type(x).__name__} cannot be read, {type(error).__name__}: {error}") from error
        if isinstance(error, TypeError | RuntimeError | ValueError | BufferError):
            error.args = (f"{name}: {error}",)
        raise


def _reader_for(name: str, x: Any) -> Callable[[Any], Array]:
    package = type(x).__module__.partition(".")[0]
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):  # np.ma is imported when it is first named, which takes 40 ms
            raise TypeError(f"{name} must not be a masked array; pass its data and, if that is meant, mask=")
        return read_numpy
    if package == "cupy" and hasattr(x, "__cuda_array_interface__"):
        return _cupy
    if "torch" in sys.modules and isinstance(x, sys.modules["torch"].Tensor):
        checks.setdefault("torch", torch_check())
        plain = sys.modules["torch"].Tensor.__torch_dispatch__
        if type(x).__torch_dispatch__ is not plain:
            return _torch_dispatching
        differentiated[type(x)] = torch_differentiates()
        return _torch
    if "jax" in sys.modules and isinstance(x, sys.modules["jax"].Array):
        return read_jax
    if package == "jax" and hasattr(x, "__dlpack_device__"):
        return _jax_buffer
    if package in ("numba", "numba_cuda") and hasattr(x, "__cuda_array_interface__"):
        return read_numba
    if hasattr(x, "__cuda_array_interface__"):
        return _cuda_interface
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _dlpack
    raise TypeError(
        f"{name} must be an array (NumPy, CuPy, torch, JAX, Numba's device arrays, or anything with "
        f"__dlpack__ or __cuda_array_interface__), not {type(x).__name__}"
    )
