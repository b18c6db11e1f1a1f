"""Layout and Array: what an array is, whatever library it comes from; and NumPy's view of one in host memory."""

import ctypes
import functools
import sys
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from .dtypes import ITEM_SIZE
from .recording import NeedsBridge


@dataclass(frozen=True, eq=False)
class Layout:
    """Describes an array, except where its bytes lie.

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
        return self.strides == strides_of_contiguous(self.shape, ITEM_SIZE[self.dtype] // self.unit)

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
    """An array as the rest of the package sees it. A class with slots, because a NamedTuple takes twice as long to
    make."""

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
        strides = strides or strides_of_contiguous(tuple(shape), 1)
        return index, tuple(shape), strides, dtype.itemsize, _name(dtype), False


NUMPY_LAYOUTS, CUPY_LAYOUTS, TORCH_LAYOUTS = _Layouts("numpy"), _Layouts("cupy"), _TorchLayouts("torch")
LAYOUTS_OF = {family: _Layouts(family) for family in ("numba", "jax", "foreign")}


def _name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        # A foreign byte order is another type altogether: ">f4" must not pass as float32.
        return dtype.name if dtype.isnative else dtype.str
    return str(dtype).removeprefix("torch.")


DTYPES = {"float16", "bfloat16", "float32", "float64"}
AUX_DTYPES = tuple(ITEM_SIZE)  # of arrays that a caller's functions read
# Where NumPy keeps an array's address: the first field of its C structure, behind Python's own header. Reading it
# there takes a quarter of the time of x.__array_struct__ and a tenth of x.ctypes.data, four times a call.
_ADDRESS = object.__basicsize__
_address_at = ctypes.c_size_t.from_address
_probe = np.empty(3)
_as_expected = _address_at(id(_probe) + _ADDRESS).value == _probe.ctypes.data


def host_pointer(x: np.ndarray) -> int:
    return _address_at(id(x) + _ADDRESS).value if _as_expected else x.ctypes.data


def host_pointers(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> tuple[int, int, int]:
    """`host_pointer` of three arrays: 0.15 us sooner than by three calls."""
    if not _as_expected:
        return x.ctypes.data, y.ctypes.data, z.ctypes.data
    at, address = _address_at, _ADDRESS
    return at(id(x) + address).value, at(id(y) + address).value, at(id(z) + address).value


def jax_layout(
    device: int | None, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, readonly: bool
) -> Layout:
    """The layout of an array in memory of XLA's, with strides in elements."""
    size = ITEM_SIZE[dtype]
    return LAYOUTS_OF["jax"][device, shape, tuple(s * size for s in strides), 1, numpy_dtype(dtype), readonly]


def contiguous_layout(family: str, device: int | None, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of a contiguous array that can be written. family: one of `LAYOUTS_OF`."""
    strides = strides_of_contiguous(shape, ITEM_SIZE[dtype])
    return LAYOUTS_OF[family][device, shape, strides, 1, numpy_dtype(dtype), False]


@functools.lru_cache(maxsize=20_000)
def contiguous_like(layout: Layout, shape: tuple[int, ...], dtype: str) -> Layout:
    """The layout of what `making.empty` makes; the same one where it is the same, which `torch_maker` looks at."""
    if layout.contiguous and layout.shape == shape and layout.dtype == dtype and not layout.readonly:
        return layout
    unit = ITEM_SIZE[dtype] if layout.family == "torch" else 1  # the family counts strides in units of so many bytes
    strides = strides_of_contiguous(shape, ITEM_SIZE[dtype] // unit)
    return Layout(layout.family, layout.device, shape, strides, unit, dtype, False)


def strides_of_contiguous(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides = [unit]
    for extent in shape[:0:-1]:
        strides.insert(0, strides[0] * extent)
    return tuple(strides[: len(shape)])


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype:
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)


def host_view(array: Array) -> np.ndarray:
    """A NumPy array over the same host memory, whatever the family; writes go through."""
    for known in (array.view, array.owner):
        if isinstance(known, np.ndarray):
            return known
    facts = array.layout
    dtype = numpy_dtype(facts.dtype)
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
