"""Fast path: read from three arrays in one pass what the key of a cached call needs.

`read` makes an Array of each and looks up its Layout. Here the same facts are read as they are, in half the time. That
counts: torch's own attention takes 5 us for a tiny problem. torch, CuPy and NumPy have a fast path.
"""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .layout import Layout, contiguous_like, host_pointer, host_pointers, numpy_dtype

Maker = Callable[[Any], Any]
Facts = tuple[Any, ...]


class FastPath(NamedTuple):
    """A library's functions that a repeated call needs for its arrays."""

    # x, y, z -> their addresses; a key of all else that a plan follows from; and whether the library must record the
    # call because one of them requires grad. None if only `read` can tell.
    facts: Callable[[Any, Any, Any], tuple[tuple[int, int, int], Facts, bool] | None]
    # an array to write to -> its address and the same key of it
    facts_of_output: Callable[[Any], tuple[int, Facts] | None]
    maker: Callable[[Layout, tuple[int, ...], str], Maker]  # layout of q, shape, dtype -> q -> new array
    address: Callable[[Any], int]
    current_stream: Callable[[int], int] | None  # of a CUDA device; None where the library knows none
    note_writing: Callable[[Any], None] | None  # called before an array of the caller's is written; None: not needed


@functools.lru_cache(maxsize=20_000)
def torch_maker(like: Layout, shape: tuple[int, ...], dtype: str) -> Maker:
    """The quickest function of torch that makes a new contiguous tensor from one with the layout `like`."""
    torch = sys.modules["torch"]
    if contiguous_like(like, shape, dtype) is like:
        return torch.empty_like  # 0.8 us sooner than new_empty (H200)
    # The shape as numbers: 0.4 us sooner than as a tuple. Of no dimensions there is no number.
    return operator.methodcaller("new_empty", *(shape or [()]), dtype=getattr(torch, dtype))


@functools.lru_cache(maxsize=20_000)
def cupy_maker(like: Layout, shape: tuple[int, ...], dtype: str) -> Maker:
    """The same for CuPy, on the device of `like`."""
    cuda, ndarray = sys.modules["cupy"].cuda, sys.modules["cupy"].ndarray  # cupy.empty() makes the same, one call later
    of_dtype, device = numpy_dtype(dtype), like.device
    if cuda.runtime.getDeviceCount() == 1:
        return lambda x: ndarray(shape, of_dtype)
    current = cuda.runtime.getDevice

    def make(x: Any) -> Any:
        if current() == device:
            return ndarray(shape, of_dtype)
        with cuda.Device(device):
            return ndarray(shape, of_dtype)

    return make


@functools.lru_cache(maxsize=20_000)
def numpy_maker(like: Layout, shape: tuple[int, ...], dtype: str) -> Maker:
    """The same for NumPy."""
    empty, of_dtype = np.empty, numpy_dtype(dtype)
    return lambda x: empty(shape, of_dtype)


@functools.cache
def of_torch() -> FastPath:
    torch = sys.modules["torch"]
    dispatch_modes, function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
    transforms, forward_ad = torch._C._are_functorch_transforms_active, torch.autograd.forward_ad
    is_grad_enabled, profiler = torch.is_grad_enabled, torch.autograd.profiler

    def facts(x: Any, y: Any, z: Any) -> Any:
        if dispatch_modes() or function_modes() or transforms() or forward_ad._current_level >= 0:
            return None
        if profiler._is_profiler_enabled:  # `recording.shown` is for it
            return None
        try:
            addresses = x.data_ptr(), y.data_ptr(), z.data_ptr()
            if 0 in addresses:
                return None
            facts = (
                x.shape, y.shape, z.shape, x.dtype, y.dtype, z.dtype, x.device, y.device, z.device,
                x.is_contiguous() or x.stride(), y.is_contiguous() or y.stride(), z.is_contiguous() or z.stride(),
                x.is_neg(), y.is_neg(), z.is_neg(), type(x), type(y), type(z),
            )  # fmt: skip
            return addresses, facts, is_grad_enabled() and (x.requires_grad or y.requires_grad or z.requires_grad)
        except (RuntimeError, AttributeError):  # one has no address, or is no tensor
            return None

    def facts_of_output(x: Any) -> Any:
        try:
            if x.requires_grad:  # only `read` says when it may be written
                return None
            facts = x.shape, x.dtype, x.device, x.is_contiguous() or x.stride(), x.is_neg(), type(x)
            return x.data_ptr(), facts
        except (RuntimeError, AttributeError):
            return None

    stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # not there in a torch for CPUs
    return FastPath(
        facts, facts_of_output, torch_maker, torch.Tensor.data_ptr, stream, torch.autograd.graph.increment_version
    )


@functools.cache
def of_cupy() -> FastPath:
    cupy = sys.modules["cupy"]
    current = cupy.cuda.get_current_stream

    def facts(x: Any, y: Any, z: Any) -> Any:
        kind = type(x)
        if type(y) is not kind or type(z) is not kind:
            return None
        data_x, data_y, data_z = x.data, y.data, z.data
        addresses = data_x.ptr, data_y.ptr, data_z.ptr
        if 0 in addresses:
            return None
        facts = (
            kind, x.shape, y.shape, z.shape, x.strides, y.strides, z.strides, x.dtype, y.dtype, z.dtype,
            data_x.device_id, data_y.device_id, data_z.device_id,
        )  # fmt: skip
        return addresses, facts, False

    def facts_of_output(x: Any) -> Any:
        data = x.data
        return data.ptr, (type(x), x.shape, x.strides, x.dtype, data.device_id)

    address = operator.attrgetter("data.ptr")
    return FastPath(facts, facts_of_output, cupy_maker, address, lambda device: current(device).ptr, None)


def _numpy_facts(x: Any, y: Any, z: Any) -> Any:
    kind = np.ndarray
    if type(x) is not kind or type(y) is not kind or type(z) is not kind:
        return None
    return (
        host_pointers(x, y, z),
        (x.shape, y.shape, z.shape, x.strides, y.strides, z.strides, x.dtype, y.dtype, z.dtype),
        False,
    )


def _numpy_facts_of_output(x: Any) -> Any:
    return (host_pointer(x), (x.shape, x.strides, x.dtype)) if x.flags.writeable else None


NUMPY = FastPath(_numpy_facts, _numpy_facts_of_output, numpy_maker, host_pointer, None, None)
