"""Shared memory that a kernel reads and writes by index: each element passes shared_memory's check for races.

A race is two accesses of one element by two threads, at least one of them a write, with no barrier in between. Two
threads that write the same bits are none: on a GPU, too, the result is the same. Elements of fewer than 4 bytes are not
checked, because the check knows words of 4 bytes.
"""

from operator import index as as_int

import numpy as np

from . import now

SMALLEST = 4  # bytes of an element


class Indexed:
    """A shared array as a kernel sees it. `array` is the same memory without a check; repr and NumPy show it."""

    __slots__ = ("_begin", "_first", "_read_word", "_reads_as", "_room", "_shared", "array")

    def __init__(self, shared, array):
        self._shared, self.array = shared, array
        self._reads_as, self._read_word = shared.order.reads_as, shared.read_word
        self._begin = shared.address(array) if array.size else 0
        self._room = np.empty(1, array.dtype)
        # The first word of a plain row of words. Most arrays are one, and reading a word is what kernels do most.
        is_row = array.ndim == 1 and array.strides[0] == array.itemsize == SMALLEST
        self._first = self._begin >> 2 if is_row else None

    def __getitem__(self, index):
        value = self.array[index]  # raises past the end
        if value.__class__ is np.ndarray:
            return Indexed(self._shared, value)
        thread = now.thread
        if self._first is None or index.__class__ is tuple:
            for word in self._words(index):
                self._read_word(word, thread)
            return value
        at = as_int(index)
        word = self._first + (at if at >= 0 else at + len(self.array))
        if thread.reads[word] != self._reads_as[thread.number]:  # equal: it has read it, and nobody has written since
            self._read_word(word, thread)
        return value

    def __setitem__(self, index, value):
        place = self.array[index]
        if place.__class__ is np.ndarray:
            part = Indexed(self._shared, place)
            for at, one in np.ndenumerate(np.broadcast_to(value, place.shape)):
                part[at] = one
            return
        self._room[0] = value
        self._shared.store_by_index(self._words(index), self._room.tobytes(), now.thread)

    def note_atomic(self, index):
        """The running thread's atomic operation: in order with all other ones, and news to who reads by index."""
        words = self._words(index)
        self._shared.add_to(slice(words.start, words.stop), now.thread)

    def _words(self, index):
        """The numbers of an element's words."""
        if self._first is not None and index.__class__ is not tuple:
            at = as_int(index)
            word = self._first + (at if at >= 0 else at + len(self.array))
            return range(word, word + 1)
        index = index if isinstance(index, tuple) else (index,)
        places = zip(index, self.array.shape, self.array.strides, strict=True)
        at = self._begin + sum((int(i) + n if i < 0 else int(i)) * stride for i, n, stride in places)
        return range(at >> 2, (at + self.array.itemsize) >> 2)

    def __len__(self):
        return len(self.array)

    def __repr__(self):
        return repr(self.array)

    def __getattr__(self, name):
        return getattr(self.array, name)  # shape, dtype, and others for a person in the debugger


class Atomic:
    """Numba's `cuda.atomic`, which knows no Indexed."""

    def __init__(self, numbas):
        self._numbas = numbas

    def __getattr__(self, name):
        operation = getattr(self._numbas, name)

        def atomic(array, *arguments):
            if isinstance(array, Indexed):
                array.note_atomic((0,) * array.ndim if name == "compare_and_swap" else arguments[0])
                array = array.array
            return operation(array, *arguments)

        return atomic
