"""Foreign arrays in, outputs out: NumPy, CuPy, Numba, torch, JAX, DLPack, CUDA Array Interface.

`read` turns what the caller handed over into an address and a `Layout`, without a copy and without
waiting for the device. No framework is imported here that the caller did not import: an array's own
type names its family, and the family's module is then in sys.modules already. No attention words.
"""

import contextlib
import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..machine import context
from .recording import NeedsBridge as NeedsBridge
from .recording import torch_check, torch_differentiates


@dataclass(frozen=True, eq=False)
class Layout:
    """What an array is, apart from where its bytes lie.

    Equal layouts are one object (`_Layouts` has it), so that looking up what was decided for a set of
    layouts compares addresses: a call with small arrays costs less than hashing their shapes would.
    """

    family: str  # "numpy", "cupy", "numba", "torch", "jax", or "foreign" for a bare protocol
    device: int | None  # CUDA device, None = host memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in units of `unit` bytes, as the family counts them
    unit: int
    dtype: str
    readonly: bool

    @functools.cached_property
    def contiguous(self) -> bool:
        return self.strides == _contiguous_strides(self.shape, ITEM_SIZE[self.dtype] // self.unit)

    @functools.cached_property
    def byte_bounds(self) -> tuple[int, int]:
        """The bytes [low, high) that the elements cover, counted from the first element."""
        if 0 in self.shape:
            return 0, 0
        reach = [s * self.unit * (n - 1) for s, n in zip(self.strides, self.shape, strict=True)]
        return sum(min(0, x) for x in reach), sum(max(0, x) for x in reach) + ITEM_SIZE[self.dtype]


@final
@dataclass(slots=True, eq=False)
class Array:
    """An array as the rest of the package sees it. Not a tuple: one takes twice as long to make, four times a call."""

    pointer: int
    layout: Layout
    owner: Any  # the object that came in; keeps the memory alive
    view: Any = None  # a view of it that NumPy or cuda.core made, where one was needed
    after: int | None = None  # the stream on which its producer still may be at work


class _Layouts(dict):
    """(device, shape, strides, unit, dtype, readonly) -> the one Layout of a family with these facts.

    dtype is a name, a NumPy dtype or a torch dtype. Subscripting one that was seen costs no function call.
    """

    def __init__(self, family: str):
        self.family = family

    def __missing__(self, key: tuple) -> Layout:
        if len(self) > 20_000:  # shapes that change with every call must not pile up
            self.clear()
        # the one object, also when two threads come here at once
        return self.setdefault(key, Layout(self.family, *self.facts(*key)))

    @staticmethod
    def facts(device: Any, shape: Any, strides: Any, unit: int, dtype: Any, readonly: bool) -> tuple[Any, ...]:
        return device, tuple(shape), tuple(strides), unit, _name(dtype), readonly


class _TorchLayouts(_Layouts):
    """(torch.device, shape, strides, torch dtype) -> Layout. Strides are None where a tensor is contiguous: it is asked
    as little as can be, and that is the cheaper question.
    """

    @staticmethod
    def facts(device: Any, shape: Any, strides: Any, dtype: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError(f"a tensor on {device}")
        # While torch.jit.trace runs, the numbers of a shape are new objects each time, so that it always comes here.
        if sys.modules["torch"]._C._get_tracing_state() is not None:
            raise NeedsBridge("torch.jit.trace records what is done, and would miss what is computed here", "torch")
        index = device.index if device.type == "cuda" else None
        strides = strides or _contiguous_strides(tuple(shape), 1)
        return index, tuple(shape), strides, dtype.itemsize, _name(dtype), False


_numpy_layouts, _cupy_layouts, _torch_layouts = _Layouts("numpy"), _Layouts("cupy"), _TorchLayouts("torch")
_layouts = {family: _Layouts(family) for family in ("numba", "jax", "foreign")}


def _name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        # A foreign byte order is another type altogether: ">f4" must not pass as float32.
        return dtype.name if dtype.isnative else dtype.str
    return str(dtype).removeprefix("torch.")


DTYPES = {"float16", "bfloat16", "float32", "float64"}
ITEM_SIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int32": 4}
ITEM_SIZE |= {"int8": 1, "int16": 2, "int64": 8, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}
AUX_DTYPES = tuple(ITEM_SIZE)  # of arrays that a caller's functions read


# Where NumPy keeps an array's address: the first field of its C structure, behind Python's own header. Reading it
# there takes a quarter of the time of x.__array_struct__ and a tenth of x.ctypes.data, four times a call.
_ADDRESS = object.__basicsize__
_address_at = ctypes.c_size_t.from_address
_probe = np.empty(3)
_as_expected = _address_at(id(_probe) + _ADDRESS).value == _probe.ctypes.data


def host_pointer(x: np.ndarray) -> int:
    return _address_at(id(x) + _ADDRESS).value if _as_expected else x.ctypes.data


def _numpy(x: Any) -> Array:
    facts = _numpy_layouts[None, x.shape, x.strides, 1, x.dtype, not x.flags.writeable]
    return Array(host_pointer(x), facts, x)


def _cupy(x: Any) -> Array:
    data = x.data
    return Array(data.ptr, _cupy_layouts[data.device_id, x.shape, x.strides, 1, x.dtype, False], x)


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
        return Array(pointer, _torch_layouts[x.device, x.shape, strides, x.dtype], x)
    except RuntimeError as error:  # only a dense tensor has an address and strides
        if _is_transformed(x):
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


def _is_transformed(x: Any) -> bool:
    return sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(x)


NESTED = "a torch tensor must not be nested; pass torch.nested.to_padded_tensor(...)"


def _torch_dispatching(x: Any) -> Array:
    if x.is_nested:
        raise TypeError(NESTED)
    raise NeedsBridge(f"a {type(x).__name__} was given, a torch tensor without an address of its own", "torch")


def _jax(x: Any) -> Array:
    jax = sys.modules["jax"]
    if isinstance(x, jax.core.Tracer):
        raise NeedsBridge(
            "a traced JAX array was given, which has no values: call this outside jax.jit and jax.grad", "jax"
        )
    if next(iter(x.devices())).platform != "cpu":
        return _dlpack(x, "jax")
    host = np.asarray(x)  # a view: JAX's host buffers are NumPy's to read
    facts = _layouts["jax"][None, host.shape, host.strides, 1, host.dtype, True]
    return Array(host_pointer(host), facts, x, host)


def _jax_buffer(x: Any) -> Array:
    """What JAX hands to a callback: memory of XLA's. Results are written there."""
    if x.__dlpack_device__()[0] != 1:  # kDLCPU
        return _cuda_interface(x, "jax")
    host = np.asarray(x)
    facts = _layouts["jax"][None, host.shape, host.strides, 1, host.dtype, not host.flags.writeable]
    return Array(host_pointer(host), facts, x, host)


def jax_addresses(buffers: Sequence[Any]) -> tuple[list[int], int | None]:
    """Where the buffers of one callback of JAX lie, and on which CUDA device, which is None for host memory.

    A callback knows their shapes and dtypes. `read`, which asks for those, takes three times as long.
    """
    if buffers[0].__dlpack_device__()[0] == 1:  # kDLCPU
        return [host_pointer(x.__array__()) for x in buffers], None
    pointers = [x.__cuda_array_interface__["data"][0] for x in buffers]
    return pointers, _device_of(max(pointers))  # an empty array has no address


def jax_layout(
    device: int | None, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, readonly: bool
) -> Layout:
    """The layout of an array in memory of XLA's, with strides in elements."""
    size = ITEM_SIZE[dtype]
    return _layouts["jax"][device, shape, tuple(s * size for s in strides), 1, _numpy_dtype(dtype), readonly]


def contiguous_layout(family: str, device: int | None, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of a contiguous array that can be written. family: one of `_layouts`."""
    strides = _contiguous_strides(shape, ITEM_SIZE[dtype])
    return _layouts[family][device, shape, strides, 1, _numpy_dtype(dtype), False]


def _cuda_interface(x: Any, family: str = "foreign") -> Array:
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise NotImplementedError("an array with a mask in its CUDA Array Interface was given; unmask it first")
    pointer, readonly = interface["data"]
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = _contiguous_strides(shape, dtype.itemsize)
    dtype = np.dtype(getattr(x, "dtype", dtype))  # typestr cannot say bfloat16, a dtype can
    facts = _layouts[family][_device_of(pointer), shape, tuple(strides), 1, dtype, readonly]
    after = None if family == "jax" else interface.get("stream")  # XLA calls back when all is ready
    return Array(pointer, facts, x, after=after)


def _numba(x: Any) -> Array:
    return _cuda_interface(x, "numba")


def _dlpack(x: Any, family: str = "foreign") -> Array:
    if x.__dlpack_device__()[0] == 1:  # kDLCPU
        host = np.from_dlpack(x)
        facts = _layouts[family][None, host.shape, host.strides, 1, host.dtype, not host.flags.writeable]
        return Array(host_pointer(host), facts, x, host)
    from cuda.core.utils import StridedMemoryView

    view = StridedMemoryView.from_dlpack(x, stream_ptr=LEGACY_DEFAULT)  # which then waits for the producer
    dtype = np.dtype(view.dtype)
    strides = view.strides or _contiguous_strides(tuple(view.shape), 1)
    readonly = view.readonly or family == "jax"
    facts = _layouts[family][view.device_id, tuple(view.shape), tuple(strides), dtype.itemsize, dtype, readonly]
    return Array(view.ptr, facts, x, view, LEGACY_DEFAULT)


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

# family -> what is to be called with all arrays of a call, once they are read: it raises NeedsBridge where the family's
# library records whatever is done, by other means than its arrays. There from the first array of the family on.
checks: dict[str, Callable[[Sequence[Array | None]], None]] = {}

# type of q -> whether its library differentiates a call with these q, k and v. `read` finds out too, by an exception
# that takes 3 to 8 us.
differentiated: dict[type, Callable[[Any, Any, Any], bool]] = {}


def read(name: str, x: Any) -> Array:
    """The address and layout of argument `name`."""
    reader = _READERS.get(type(x))
    if reader is None:
        reader = _READERS[type(x)] = _reader_for(name, x)
    try:
        return reader(x)
    except (TypeError, NotImplementedError, ValueError) as error:
        error.args = (f"{name}: {error}",)
        raise


def _reader_for(name: str, x: Any) -> Callable[[Any], Array]:
    package = type(x).__module__.partition(".")[0]
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):  # np.ma is imported when it is first named, which takes 40 ms
            raise TypeError(f"{name} must not be a masked array; pass its data and, if that is meant, mask=")
        return _numpy
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
        return _jax
    if package == "jax" and hasattr(x, "__dlpack_device__"):
        return _jax_buffer
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
    layout = _contiguous_like(like.layout, shape, dtype)
    make = _MAKERS.get(layout.family)
    if make is None:
        raise TypeError(
            f"q is a {type(like.owner).__module__}.{type(like.owner).__name__}, of which "
            "numba_flash cannot make new ones: pass out= (and with return_lse a pair out=(o, lse))"
        )
    return make(like, layout)


@functools.lru_cache(maxsize=20_000)
def _contiguous_like(layout: Layout, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of what `empty` makes; the same one where it is the same, which `_empty_torch` looks at."""
    if layout.contiguous and layout.shape == shape and layout.dtype == dtype and not layout.readonly:
        return layout
    unit = ITEM_SIZE[dtype] if layout.family == "torch" else 1  # what the family counts its strides in
    strides = _contiguous_strides(shape, ITEM_SIZE[dtype] // unit)
    return Layout(layout.family, layout.device, shape, strides, unit, dtype, False)


def _empty_numpy(like: Array, layout: Layout) -> Array:
    x = np.empty(layout.shape, _numpy_dtype(layout.dtype))
    return Array(host_pointer(x), layout, x, x)


def _empty_cupy(like: Array, layout: Layout) -> Array:
    cupy = sys.modules["cupy"]
    if cupy.cuda.runtime.getDevice() == layout.device:
        x = cupy.ndarray(layout.shape, _numpy_dtype(layout.dtype))  # what cupy.empty() makes one call later
    else:
        with cupy.cuda.Device(layout.device):
            x = cupy.ndarray(layout.shape, _numpy_dtype(layout.dtype))
    return Array(x.data.ptr, layout, x)


def _empty_torch(like: Array, layout: Layout) -> Array:
    torch = sys.modules["torch"]
    if layout is like.layout:
        x = torch.empty_like(like.owner)  # 0.8 us sooner than new_empty (H200)
    else:
        x = like.owner.new_empty(layout.shape, dtype=getattr(torch, layout.dtype))
    try:
        return Array(x.data_ptr(), layout, x)
    except RuntimeError:
        if not _is_transformed(x):
            raise
        raise NeedsBridge("torch.func transforms whatever is made here", "torch") from None


def _empty_numba(like: Array, layout: Layout) -> Array:
    from numba import cuda

    with cuda.gpus[layout.device]:
        return _numba(cuda.device_array(layout.shape, _numpy_dtype(layout.dtype)))


def _empty_jax(like: Array, layout: Layout) -> Array:
    if layout.device is not None:
        return scratch(like, layout.shape, layout.dtype)
    return _numpy(_aligned(layout.shape, _numpy_dtype(layout.dtype)))


_MAKERS: dict[str, Callable[[Array, Layout], Array]] = dict(
    numpy=_empty_numpy, cupy=_empty_cupy, torch=_empty_torch, numba=_empty_numba, jax=_empty_jax
)


def empty_for(stream: int, like: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """`empty` for work on this stream. CuPy and torch hand memory out for work on their current stream, which it may
    still serve, and hand it out again as soon as nobody holds it."""
    layout = like.layout
    if layout.device is None or layout.family not in ("cupy", "torch"):
        return empty(like, shape, dtype)
    if (stream or LEGACY_DEFAULT) == (_current_stream(like) or LEGACY_DEFAULT):
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
    numpy_dtype = _numpy_dtype("int16" if dtype == "bfloat16" else dtype)
    size = math.prod(shape) * numpy_dtype.itemsize
    buffer = device.allocate(max(size, 1), stream=_core_stream(stream))  # also the stream that frees it
    view = StridedMemoryView.from_buffer(buffer, shape, itemsize=numpy_dtype.itemsize, dtype=numpy_dtype)
    return Array(int(buffer.handle), like.layout, buffer, view)


@contextlib.contextmanager
def _library_on(like: Array, stream: int) -> Iterator[None]:
    """With this one as the current stream of CuPy or torch."""
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
    """Before arrays of the caller's are written: torch then notices it where autograd saved what stood there."""
    for array in written:
        if array is not None and array.layout.family == "torch":
            sys.modules["torch"].autograd.graph.increment_version(array.owner)


def give(like: Array, array: Array) -> Any:
    """The object to hand to the caller for an array that `empty` made."""
    if like.layout.family != "jax" or isinstance(array.owner, type(like.owner)):
        return array.owner
    jax = sys.modules["jax"]
    return jax.numpy.asarray(array.owner) if array.layout.device is None else jax.dlpack.from_dlpack(_Handover(array))


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


def as_bfloat16(capsule: Any) -> Any:
    """A DLPack capsule of int16 as one of bfloat16. A field of dlpack.h's DLTensor is written in place: code of dtype,
    20 bytes from its beginning, which is that of the capsule or, since version 1.0, 32 bytes behind it."""
    # Prototypes of our own: ctypes.pythonapi's functions are shared by everyone in the process.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
    name = name_of(capsule)
    tensor = pointer_of(capsule, name) + (32 if name == b"dltensor_versioned" else 0)
    ctypes.c_uint8.from_address(tensor + 20).value = 4  # kDLBfloat
    return capsule


@functools.cache
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
    facts = array.layout
    dtype = _numpy_dtype(facts.dtype)
    if 0 in facts.shape:
        return np.empty(facts.shape, dtype)
    low, high = facts.byte_bounds
    memory: Any = (ctypes.c_char * (high - low)).from_address(array.pointer + low)
    view = np.ndarray(
        facts.shape, dtype, np.frombuffer(memory, np.uint8), -low, [s * facts.unit for s in facts.strides]
    )
    view.flags.writeable = not facts.readonly
    return view


def is_array(x: Any) -> bool:
    """Whether x is an array rather than a plain number (NumPy's scalars are numbers)."""
    return hasattr(x, "shape") and not isinstance(x, np.generic)


LEGACY_DEFAULT = 1  # the address of this stream, which is also called 0


def stream_of(given: Sequence[Array | None], stream: Any) -> int:
    """The address of the stream to work on: the given one, or the one that the first array's family is working on.

    It waits for the producers of all these arrays. 0 is the legacy default stream; arrays in host memory have none.
    """
    like = given[0]
    assert like is not None
    if like.layout.device is None:
        return 0
    address = _current_stream(like) if stream is None else _stream_address(stream)
    if like.layout.family not in ("cupy", "torch"):  # whose own work is on the current stream
        _wait_for_producers(given, like.layout.device, address or LEGACY_DEFAULT)
    return address


def _wait_for_producers(given: Sequence[Array | None], device: int, address: int) -> None:
    streams = {array.after or LEGACY_DEFAULT for array in given if array is not None and array.after is not None}
    others = sorted(streams - {address})
    if others:
        context.ensure(device)
    for other in others:
        _core_stream(address).wait(_core_stream(other))


def _core_stream(address: int) -> Any:
    """The stream as cuda.core knows it."""
    from cuda.core import LEGACY_DEFAULT_STREAM, Stream

    return Stream.from_handle(address) if address > LEGACY_DEFAULT else LEGACY_DEFAULT_STREAM


def _current_stream(like: Array) -> int:
    family, device = like.layout.family, like.layout.device
    if family == "cupy":
        return sys.modules["cupy"].cuda.get_current_stream(device).ptr
    if family == "torch":
        return sys.modules["torch"]._C._cuda_getCurrentRawStream(device)  # without making a Stream of it
    return like.after or 0


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
