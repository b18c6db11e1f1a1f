"""Counts what simulated kernels move: bytes of global and of shared memory, and operations of tensor cores.

All that moves passes one of a few functions of this folder. `counting` puts a function that counts around each, so a
launch that nobody counts runs as before. What is counted is what the kernel asks for. A GPU's caches answer a part of
it, and shared memory takes more time where lanes meet in a bank.
"""

import contextlib
import functools

import numpy as np

from . import indexed, launch, shared_memory, tma, warp
from .global_memory import GlobalMemory

MMA = {"m16n8k16": 16 * 8 * 16, "m16n8k8": 16 * 8 * 8, "m8n8k4": 8 * 8 * 4}  # multiplications of an instruction


class Counts:
    """Bytes, and floating-point operations (a multiplication and an addition are two)."""

    def __init__(self):
        self.global_read = self.global_written = self.shared_read = self.shared_written = self.tensor_flops = 0
        self.inside = False  # one of the counted functions, which may call another

    def add(self, name, count):
        setattr(self, name, getattr(self, name) + int(count))


@contextlib.contextmanager
def counting():
    """-> Counts of all that is launched meanwhile, by launch.run and as Numba launches a caller's own kernel."""
    from numba.cuda.simulator.cudadrv.devicearray import FakeWithinKernelCUDAArray

    counts = Counts()
    shared = shared_memory.SharedMemory
    places = [
        (launch.Pointer, "__setitem__", _elements, "global_written"),
        (FakeWithinKernelCUDAArray, "__getitem__", _of_numba, "global_read"),
        (FakeWithinKernelCUDAArray, "__setitem__", _of_numba, "global_written"),
        (GlobalMemory, "bytes_at", _by_address, ""),
        (tma, "fetched", _of_box, "global_read"),
        (tma, "stored", _of_stored_box, "global_written"),
        (shared, "read", _words, "shared_read"),  # ldmatrix, wgmma's operands, TMA stores
        (shared, "read_few", _words, "shared_read"),
        (shared, "start_copy", _words, "shared_written"),  # cp.async, TMA loads
        (shared, "store", _stored, "shared_written"),
        (shared, "store_by_index", _stored, "shared_written"),
        (warp, "_all_are_there", _product, "tensor_flops"),
    ]
    with contextlib.ExitStack() as undo:
        for owner, name, bytes_of, what in places:
            counted = _counted(counts, getattr(owner, name), bytes_of, what)
            undo.enter_context(_replaced(owner, name, counted))
        for owner, name in ((launch.Pointer, "global_read"), (indexed.Indexed, "shared_read")):  # most calls of all
            undo.enter_context(_replaced(owner, "__getitem__", _read_by_index(counts, owner, name)))
        undo.enter_context(_replaced(shared, "_checked", _seen(counts, shared._checked)))
        yield counts


@contextlib.contextmanager
def _replaced(owner, name, function):
    """A function of a class or module, meanwhile another. (unittest.mock imports what a browser has not.)"""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _counted(counts, function, bytes_of, what):
    @functools.wraps(function)
    def counted(*arguments, **options):
        if counts.inside:
            return function(*arguments, **options)
        counts.inside = True
        try:
            result = function(*arguments, **options)
        finally:
            counts.inside = False
        name, count = bytes_of(what, arguments, options, result)
        counts.add(name, count)
        return result

    return counted


def _read_by_index(counts, owner, name):
    read = owner.__getitem__

    def counted(self, index):
        value = read(self, index)
        if value.__class__ is not owner:  # a part of an array
            setattr(counts, name, getattr(counts, name) + value.nbytes)
        return value

    return counted


# The traffic of one call of each function: -> (name of the count, how much).


def _elements(what, arguments, options, result):
    return what, arguments[0]._flat.itemsize


def _of_numba(what, arguments, options, result):
    array, index = arguments[0]._item._ary, arguments[1]
    place = array[index]
    return what, 0 if isinstance(place, np.ndarray) and what == "global_read" else place.nbytes


def _by_address(what, arguments, options, result):
    writing = options.get("writing", arguments[4] if len(arguments) > 4 else False)
    return ("global_written" if writing else "global_read"), arguments[2]


def _of_box(what, arguments, options, result):
    return what, arguments[0][tma.overlap(arguments[0].shape, arguments[1], arguments[2])[0]].nbytes


def _of_stored_box(what, arguments, options, result):
    return what, arguments[0][tma.overlap(arguments[0].shape, arguments[1].shape, arguments[2])[0]].nbytes


def _words(what, arguments, options, result):
    words = arguments[1]
    return what, 4 * (words.stop - words.start if isinstance(words, slice) else words.size)


def _stored(what, arguments, options, result):
    return what, len(arguments[2])


def _product(what, arguments, options, result):
    name, *constants = arguments[0].instruction
    family, _, kind = name.partition(".")
    if family == "mma":
        return what, 2 * MMA[kind.partition("_")[0]]
    if family == "wgmma" and "product" in kind:  # n columns, and a step of 16 for each of b's offsets
        return what, 2 * 64 * constants[0] * 16 * len(constants[-2])
    return what, 0


def _seen(counts, checked):
    """Shared arrays of elements that are too small to be checked for races are counted all the same."""

    class Counted(np.ndarray):
        def __getitem__(self, index):
            value = super().__getitem__(index)
            if not isinstance(value, np.ndarray):
                counts.add("shared_read", value.nbytes)
            return value

        def __setitem__(self, index, value):
            counts.add("shared_written", super().__getitem__(index).nbytes)
            super().__setitem__(index, value)

    def of(memory, array):
        found = checked(memory, array)
        return found.view(Counted) if isinstance(found, np.ndarray) else found

    return of
