"""Launching a kernel in Numba's CUDA simulator: memory that checks its bounds, one launch at a time."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from operator import index as as_int
from types import FunctionType
from typing import Any

import numpy as np

from ...arrays import Array, host_view
from ...machine import toolchain
from . import now, resumable
from .numbers import converter

_one_at_a_time = threading.Lock()  # a second launch beside a running one would be taken for a device call
_unfinished: set[int] = set()  # addresses of arrays that kernels have written since one was launched behind nobody


def _misuse(text: str) -> Exception:
    from .errors import InstructionError  # Numba comes in with it

    return InstructionError(text)


class Pointer:
    """An array as a kernel sees it: an address that can be indexed, like a C pointer, but checked.

    Index 0 is the array's first element; with negative strides the others lie before it. bfloat16
    is shown as its 16 bits, as it is to the compiled kernel. Blocks have no order, so no two may store the same
    element, even if they store the same number.
    """

    __slots__ = ("_begin", "_first", "_flat", "_size", "_stored_by", "array", "unfinished", "written")

    def __init__(self, array: np.ndarray):
        self.array = array  # for a person in the debugger
        self.unfinished = False  # a kernel before may still be writing it, until griddepcontrol.wait
        self.written = False  # by this launch
        self._stored_by: dict[int, int] = {}  # element -> block, or the first of its cluster
        if array.dtype.name == "bfloat16":
            array = array.view(np.uint16)
        elif array.dtype == bool:
            array = array.view(np.uint8)
        item = array.itemsize
        backwards: Any = (*[slice(None, None, -1 if s < 0 else 1) for s in array.strides], ...)
        lowest = array[backwards]
        reach = [s // item * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)] if array.size else []
        length = 1 + sum(abs(x) for x in reach) if array.size else 0
        self._first = -sum(min(0, x) for x in reach)
        self._flat = np.lib.stride_tricks.as_strided(lowest, (length,), (item,), writeable=array.flags.writeable)
        self._size = length
        self._begin = self._flat.__array_interface__["data"][0]  # asking takes 3 us

    def __getitem__(self, index: int) -> Any:
        if self.unfinished:
            self.check_waited("is read")
        position = as_int(index) + self._first
        if not 0 <= position < self._size:
            self._checked(index)  # raises the error
        return self._flat[position]

    def __setitem__(self, index: int, value: Any) -> None:
        position = self._checked(index)
        self.store(position, 1)
        self._flat[position] = value

    def store(self, position: int, count: int) -> None:
        """The running thread stores so many elements, from the position-th from the lowest on."""
        if now.thread is None:  # in Numba's own simulator
            return
        self.mark_written()
        turns = now.thread.turns
        for stored in range(position, position + count):
            other = self._stored_by.setdefault(stored, turns.first_block)
            if other != turns.first_block:
                where = f"element {stored - self._first} of an array of shape {self.array.shape}"
                raise _misuse(f"{where} was stored by block {other}, and blocks have no order")

    def mark_written(self) -> None:
        self.written = True
        self.check_waited("is written")

    def check_waited(self, what: str) -> None:
        if not now.current().waited:
            shape = self.array.shape
            raise _misuse(
                f"an array of shape {shape} {what} before griddepcontrol.wait: the kernel before may still run"
            )

    def _checked(self, index: int) -> int:
        position = as_int(index) + self._first
        if not 0 <= position < self._size:
            raise IndexError(f"element {index} lies outside of an array of shape {self.array.shape}")
        return position

    def address(self, index: int) -> int:
        """The address of an element in the host's memory. It may lie outside of the array."""
        return self._begin + (index + self._first) * self._flat.itemsize

    def bytes(self) -> tuple[int, np.ndarray]:
        """(address of the lowest byte, all bytes from there on)."""
        return self._begin, self._flat.view(np.uint8)

    def __repr__(self) -> str:
        return f"Pointer to {self.array.dtype} {self.array.shape}\n{self.array}"


def run(
    make_kernel: Callable[[], Any],
    blocks: int,
    threads: int,
    shared_bytes: int,
    arrays: tuple[Array | None, ...],
    values: tuple[Any, ...],
    tensor_maps: tuple[tuple[int, Any], ...] = (),
    cluster: int = 1,
    behind: bool = False,
) -> None:
    """Make a kernel with @cuda.jit and run it. Exceptions in it are raised here, with thread and block.

    arrays, values: what the kernel takes (abi/arguments.py), with arrays where it sees pointers. A NamedTuple of
    arrays is one parameter; those of a plain tuple are parameters of their own.
    tensor_maps: (number of the operand whose memory it describes, TensorMap) in the kernel's order. A kernel
    that has some takes a first parameter more, which stands for their 128 bytes each and is 0 here. cluster: how
    many neighbouring blocks run together. behind: as if by programmatic stream serialization it may start before the
    kernel before has ended. Until griddepcontrol.wait a thread must then write nothing, and read nothing that was
    written since the last launch that was not so.
    """
    toolchain.cuda()
    from .global_memory import GlobalMemory  # Numba comes in with it

    pointers = [_given(array) for array in arrays]
    operands = [x if isinstance(x, Pointer) else None for x in pointers]
    memory = GlobalMemory(operands, tensor_maps, behind)
    first = (np.uint64(0),) if tensor_maps else ()
    with _one_at_a_time, _in_its_place(operands, behind):
        given = [type(arrays)(*pointers)] if hasattr(arrays, "_fields") else pointers
        arguments = (*first, *given, *[_typed(value) for value in values])
        _run(make_kernel(), blocks, threads, shared_bytes, cluster, memory, arguments)


@contextlib.contextmanager
def of_the_caller() -> Iterator[None]:
    """Meanwhile kernel[blocks, threads](...) runs here too, with a caller's own kernel and arrays."""
    from numba.cuda.simulator import kernel as numba_kernel

    from .global_memory import GlobalMemory

    kernels, manager = numba_kernel.FakeCUDAKernel, numba_kernel.BlockManager
    launch = kernels.__call__

    def call(kernel: Any, *arguments: Any) -> Any:
        if numba_kernel.BlockManager is not manager:  # within a launch of run()
            return launch(kernel, *arguments)
        with _one_at_a_time, _instead_of_numbas(numba_kernel, GlobalMemory(()), 1), np.errstate(all="ignore"):
            return launch(kernel, *arguments)

    kernels.__call__ = call
    try:
        yield
    finally:
        kernels.__call__ = launch


@contextlib.contextmanager
def _in_its_place(operands: list[Pointer | None], behind: bool) -> Iterator[None]:
    """Marks arrays that earlier launches may still be writing, and keeps those that this one writes."""
    if not behind:
        _unfinished.clear()
    given = [pointer for pointer in operands if pointer is not None]
    for pointer in given:
        pointer.unfinished = pointer.bytes()[0] in _unfinished
    yield
    _unfinished.update(pointer.bytes()[0] for pointer in given if pointer.written)


def _given(array: Any) -> Any:
    """A pointer to an array; and a number that stands in a pointer's place as itself."""
    if isinstance(array, Array):
        return Pointer(host_view(array))
    return None if array is None else np.uint64(array.pointer)


def _typed(value: Any) -> Any:
    """Numbers with the types that the compiled kernel gives them; Python's own would take on their partners'."""
    if isinstance(value, tuple):
        members = [_typed(x) for x in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if isinstance(value, np.floating):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)


def _run(
    kernel: Any, blocks: int, threads: int, shared_bytes: int, cluster: int, memory: Any, arguments: tuple
) -> None:
    from numba.cuda.simulator import kernel as numba_kernel

    # Infinities are the kernels' business. Simulated threads have NumPy's error state from here (thread.py).
    with _instead_of_numbas(numba_kernel, memory, cluster), np.errstate(all="ignore"):
        kernel[blocks, threads, 0, shared_bytes](*arguments)


@contextlib.contextmanager
def _instead_of_numbas(numba_kernel: Any, memory: Any, cluster: int) -> Iterator[None]:
    """Blocks that take turns, and device functions that are called like any other function.

    Numba swaps `cuda` in a function's module at every call of it. Here that is done once a function and launch. NumPy's
    numbers are swapped in with it (a call of Numba's gives the same number and takes ten times as long), and for a
    device function the plain one that it is made of, which Python calls without a detour.
    """
    from numba.cuda.simulator import kernelapi

    from .scheduler import Turns

    cuda, seen, undo = toolchain.cuda(), set(), contextlib.ExitStack()
    numbers = _numbers()
    kernels = numba_kernel.FakeCUDAKernel

    def swap(function: Any, simulated: Any) -> contextlib.AbstractContextManager:
        """Replaces what a function sees: names of its module, and what it closes over."""
        names = function.__globals__
        if id(names) not in seen:
            seen.add(id(names))
            before = {name: value for name, value in names.items() if instead(value, simulated) is not value}
            undo.callback(names.update, before)
            names.update({name: instead(value, simulated) for name, value in before.items()})
            undo.callback(lambda: [names.pop(name) for name in resumable.NAMES])
            names.update(resumable.NAMES)
        code = function.__code__
        if (other := resumable.code_for(function, (cuda, simulated))) is not code:
            undo.callback(setattr, function, "__code__", code)
            function.__code__ = other
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty: its function is not made yet
                value = cell.cell_contents
                other = instead(value, simulated)
                if other is not value:
                    undo.callback(setattr, cell, "cell_contents", value)
                    cell.cell_contents = other
        return nothing

    def instead(value: Any, simulated: Any) -> Any:
        if value is cuda:
            return simulated
        if isinstance(value, kernels):
            if value not in seen:
                seen.add(value)
                swap(value.fn, simulated)
            return value.fn
        if isinstance(value, tuple) and hasattr(value, "_fields"):  # such as device functions from another make
            members = [instead(member, simulated) for member in value]
            return type(value)(*members) if any(x is not y for x, y in zip(members, value, strict=True)) else value
        if (
            isinstance(value, FunctionType)
            and value not in seen
            and resumable.is_of_the_kernel(value, (cuda, simulated))
        ):
            seen.add(value)
            swap(value, simulated)
        return numbers.get(id(value), value)

    def call(kernel: Any, *arguments: Any) -> Any:
        """One that is not swapped for its function, such as the member of a tuple."""
        if kernel not in seen:
            simulated = numba_kernel._get_kernel_context()
            if simulated is None:
                return launch(kernel, *arguments)
            instead(kernel, simulated)
        return kernel.fn(*arguments)

    nothing = contextlib.nullcontext()
    blocks, swapping, launch = numba_kernel.BlockManager, numba_kernel.swapped_cuda_module, kernels.__call__
    numba_kernel.BlockManager, numba_kernel.swapped_cuda_module = functools.partial(Turns, memory, cluster), swap
    kernels.__call__ = call
    kernelapi.threading = _Running()  # Numba asks it whose threadIdx a kernel reads
    try:
        yield
    finally:
        kernelapi.threading = threading
        numba_kernel.BlockManager, numba_kernel.swapped_cuda_module, kernels.__call__ = blocks, swapping, launch
        undo.close()


class _Running:
    @staticmethod
    def current_thread() -> Any:
        return now.thread


@functools.cache
def _numbers() -> dict[int, Any]:
    """{id of one of Numba's types of numbers: its NumPy type}"""
    from numba import types

    named = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
    return {id(getattr(types, name)): converter(getattr(np, name)) for name in named}
