"""Stand-ins for ptx.ld_st."""

import numpy as np

from .now import current
from .registers import bits, u32


def load_b32(address):
    words, shared = _read(address, 4)
    return shared.bits[words.start]


def store_b32(address, value):
    _store(address, u32(value))


def load_v4(values, at, address):
    bits(values)[at : at + 4] = _loaded(address, 16)


def store_v2_f64(address, values, at):
    _store(address, values[at : at + 2])


def load_v2_f64(values, at, address):
    values[at : at + 2] = _loaded(address, 16).view(np.float64)


def load_f64(address):
    words, shared = _read(address, 8)
    return shared.doubles[words.start >> 1]


def store_v2(address, values, at):
    _store(address, values[at : at + 2])


def store_v4(address, values, at):
    _store(address, values[at : at + 4])


def _loaded(address, count):
    words, shared = _read(address, count)
    return shared.bits[words]


def _read(address, count):
    thread, address = current(), int(address)
    shared = thread.block.shared
    words = shared.words(address, count, count)
    shared.read_few(words, thread.number)
    return words, shared


def _store(address, values):
    thread = current()
    thread.block.shared.store(int(address), values.tobytes(), thread)
