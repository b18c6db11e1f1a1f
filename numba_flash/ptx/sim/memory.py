"""Stand-ins for ptx.memory. Addresses are the host's, as plain ints: arithmetic with any integer is exact."""

import numpy as np

from .now import current
from .registers import bits, u32

_ZERO = np.uint32(0)  # making one takes longer than the load


def address(pointer, index):
    return 0 if pointer is None else pointer.address(int(index))


def load_v4(values, at, address):
    bits(values)[at : at + 4] = _at(address, 16, 16, writing=False).view(np.uint32)


def load_b16_if(address, condition):
    return np.uint32(_at(address, 2, 2, writing=False).view(np.uint16)[0] if condition else 0)


def load_b32_if(address, condition):
    return _at(address, 4, 4, writing=False).view(np.uint32)[0] if condition else _ZERO


def load_v2_if(values, at, address, condition):
    bits(values)[at : at + 2] = _at(address, 8, 8, writing=False).view(np.uint32) if condition else 0


def load_v4_if(values, at, address, condition):
    bits(values)[at : at + 4] = _at(address, 16, 16, writing=False).view(np.uint32) if condition else 0


def load_f64_if(address, condition):
    return _at(address, 8, 8, writing=False).view(np.float64)[0] if condition else np.float64(0)


def store_b16(address, value):
    _at(address, 2, 2).view(np.uint16)[0] = int(value) & 0xFFFF


def store_b32(address, value):
    _at(address, 4, 4).view(np.uint32)[0] = u32(value)


def store_v2(address, values, at):
    _at(address, 8, 8).view(np.uint32)[:] = values[at : at + 2].view(np.uint32)


def store_v4(address, values, at):
    _at(address, 16, 16).view(np.uint32)[:] = values[at : at + 4].view(np.uint32)


def store_v2_f64(address, values, at):
    _at(address, 16, 16).view(np.float64)[:] = values[at : at + 2]


def add(address, value):
    place = _at(address, 4, 4, atomic=True).view(np.uint32)
    before = place[0]
    place[0] = u32(int(before) + int(value))
    return _let_others_run(before)  # kernels may ask in a loop


def add_acq_rel(address, value):
    return add(address, value)


def add_i64(address, value):
    place = _at(address, 8, 8, atomic=True).view(np.uint64)
    place[0] = (int(place[0]) + int(value)) % 2**64


def maximum(address, value):
    place = _at(address, 4, 4, atomic=True).view(np.uint32)
    place[0] = max(place[0], u32(value))


def exchange(address, value):
    place = _at(address, 4, 4, atomic=True).view(np.uint32)
    before = place[0]
    place[0] = u32(value)
    return _let_others_run(before)


def load_acquire(address):
    value = _at(address, 4, 4, writing=False).view(np.uint32)[0]
    return _let_others_run(value)  # kernels ask in a loop


def add_release(address, value):
    return add(address, value)


def _at(address, count, alignment, writing=True, atomic=False):
    return current().block.memory.bytes_at(address, count, alignment, writing, atomic)


def _let_others_run(value):
    thread = current()
    return thread.turns.let_others_run(thread, value)
