"""Stand-ins for ptx.tma. A load arrives as late as it can: when no thread can go on without it.

A store takes its data when it is issued, and until its wait_group_read nobody may overwrite them; the
tensor gets them at the wait. Bytes that are stored or added land as late as they can, at wait_group.
"""

import functools
from collections import namedtuple

import numpy as np

from .. import fragments
from .errors import InstructionError
from .global_memory import MAPS
from .mbarrier import find
from .now import current

Store = namedtuple("Store", "tensor box coordinates values words")
Landing = namedtuple("Landing", "target values words adds")  # adds: numbers of this type, or None


def overlap(shape, box, coordinates):
    """(part of the tensor, part of the box) that a box at these coordinates has in common with a tensor.

    Shape and box outermost first, coordinates innermost first, as TMA takes them.
    """
    inside, part = [], []
    for extent, size, at in zip(shape, box, coordinates[::-1], strict=True):
        first, end = max(at, 0), max(min(at + size, extent), max(at, 0))
        inside.append(slice(first, end))
        part.append(slice(first - at, end - at))
    return tuple(inside), tuple(part)


def fetched(tensor, box, coordinates):
    """The box, outermost dimension first, with zeros outside of the tensor."""
    values = np.zeros(box, tensor.dtype)
    inside, part = overlap(tensor.shape, box, coordinates)
    values[part] = tensor[inside]
    return values


def stored(tensor, values, coordinates):
    """tensor <- what the box has inside of it."""
    inside, part = overlap(tensor.shape, values.shape, coordinates)
    tensor[inside] = values[part]


def lines(address, count, swizzle_bytes):
    """Numbers of the 16-byte lines of shared memory where a box of `count` bytes lies, in the box's order."""
    return fragments.swizzled(address + 16 * np.arange(count // 16), swizzle_bytes) >> 4


def _load(target, tensor_map, barrier, *coordinates):
    thread, target = current(), int(target)
    coordinates = tuple(int(c) for c in coordinates)
    tensor_map, tensor, box = _box(thread.block, tensor_map, coordinates)
    count = _bytes(tensor_map)
    block = thread.block
    mbarrier = find(thread, barrier, block)
    _check_known(mbarrier)
    words = block.shared.words(target, count, _alignment(tensor_map))
    block.shared.start_copy(words, thread)
    block.transfers.append(_Arrival(block, target, tensor_map, tensor, box, coordinates, words, mbarrier))


class _Arrival:
    """A box on its way to a block; called when it comes."""

    def __init__(self, block, target, tensor_map, tensor, box, coordinates, words, mbarrier):
        self.block, self.words, self.mbarrier, self.count = block, words, mbarrier, _bytes(tensor_map)
        self.lines = lines(target, self.count, tensor_map.swizzle_bytes)
        self.source = tensor, box, coordinates
        self.column, self.epoch = block.order.transfer(mbarrier.number)

    def __call__(self):
        if not self.block.alive:
            raise InstructionError(
                f"a TMA load arrives at block {self.block.rank} of the cluster, which has left the kernel"
            )
        shared = self.block.shared
        shared.lines[self.lines] = fetched(*self.source).reshape(-1, 8).view(np.uint8)
        shared.copied(self.words, self.column, self.epoch)
        self.mbarrier.transfer(-self.count, self.block, self.column, self.epoch)


def _store(tensor_map, source, *coordinates):
    thread, source = current(), int(source)
    block, coordinates = thread.block, tuple(int(c) for c in coordinates)
    tensor_map, tensor, box = _box(block, tensor_map, coordinates, writing=True)
    if not tensor.flags.writeable:
        raise InstructionError(f"a TMA store to an operand that is read-only: {tensor_map}")
    count = _bytes(tensor_map)
    words = block.shared.words(source, count, _alignment(tensor_map))
    block.shared.read(words, thread.number, asynchronous=True)
    values = block.shared.lines[lines(source, count, tensor_map.swizzle_bytes)].view(np.uint16).reshape(box)
    block.shared.reading[words] += 1
    thread.stores.append(Store(tensor, box, coordinates, values, words))


def load_2d(target, tensor_map, barrier, c0, c1):
    _load(target, tensor_map, barrier, c0, c1)


def load_3d(target, tensor_map, barrier, c0, c1, c2):
    _load(target, tensor_map, barrier, c0, c1, c2)


def load_4d(target, tensor_map, barrier, c0, c1, c2, c3):
    _load(target, tensor_map, barrier, c0, c1, c2, c3)


def load_5d(target, tensor_map, barrier, c0, c1, c2, c3, c4):
    _load(target, tensor_map, barrier, c0, c1, c2, c3, c4)


class BytesArrival:
    """Bytes on their way to a block; called when they come."""

    def __init__(self, block, target, data, words, mbarrier):
        self.block, self.target, self.data, self.words, self.mbarrier = block, target, data, words, mbarrier
        self.column, self.epoch = block.order.transfer(mbarrier.number)

    def __call__(self):
        if not self.block.alive:
            raise InstructionError(f"bytes come to block {self.block.rank} of the cluster, which has left the kernel")
        shared = self.block.shared
        shared.data[self.target : self.target + self.data.size] = self.data
        shared.copied(self.words, self.column, self.epoch)
        self.mbarrier.transfer(-self.data.size, self.block, self.column, self.epoch)


def load_bytes(target, source, barrier, count):
    thread, target, count = current(), int(target), int(count)
    block, mbarrier = thread.block, find(thread, barrier)
    if count <= 0 or count % 16:
        raise InstructionError(f"tma.load_bytes moves a multiple of 16 bytes, not {count}")
    _check_known(mbarrier)
    words, data = block.shared.words(target, count, 16), block.memory.bytes_at(source, count, 16)
    block.shared.start_copy(words, thread)
    block.transfers.append(BytesArrival(block, target, data, words, mbarrier))


def _leave(target, source, count, adds):
    thread, source, count = current(), int(source), int(count)
    block = thread.block
    if count <= 0 or count % 16:
        raise InstructionError(f"tma moves a multiple of 16 bytes, not {count}")
    words = block.shared.words(source, count, 16)
    block.shared.read(words, thread.number, asynchronous=True)
    block.shared.reading[words] += 1
    to = block.memory.bytes_at(target, count, 16, writing=True, atomic=True)  # who takes turns may write there
    thread.stores.append(Landing(to, block.shared.data[source : source + count].copy(), words, adds))


def store_bytes(target, source, count):
    return _leave(target, source, count, None)


def add_bytes(target, source, count):
    return _leave(target, source, count, np.float32)


def add_bytes_f64(target, source, count):
    return _leave(target, source, count, np.float64)


def _check_known(mbarrier):
    if not mbarrier.fenced:
        raise InstructionError(
            f"{mbarrier} is not known to TMA yet: fence.mbarrier_init is missing after mbarrier.init"
        )


def store_2d(tensor_map, source, c0, c1):
    _store(tensor_map, source, c0, c1)


def store_3d(tensor_map, source, c0, c1, c2):
    _store(tensor_map, source, c0, c1, c2)


def store_4d(tensor_map, source, c0, c1, c2, c3):
    _store(tensor_map, source, c0, c1, c2, c3)


def store_5d(tensor_map, source, c0, c1, c2, c3, c4):
    _store(tensor_map, source, c0, c1, c2, c3, c4)


def commit_group():
    thread = current()
    thread.store_groups.append(thread.stores)
    thread.stores = []


@functools.cache
def wait_group_read(newest):
    def wait():
        thread = current()
        while len(thread.store_groups) > newest:
            group = thread.store_groups.popleft()
            for store in group:
                thread.block.shared.reading[store.words] -= 1
                if isinstance(store, Store):
                    stored(store.tensor, store.values, store.coordinates)
            thread.landing.append([store for store in group if isinstance(store, Landing)])

    return wait


@functools.cache
def wait_group(newest):
    read = wait_group_read(newest)

    def wait():
        read()
        landing = current().landing
        while len(landing) + len(current().store_groups) > newest:
            for target, values, _, adds in landing.popleft():
                if adds:
                    target.view(adds)[...] += values.view(adds)
                else:
                    target[...] = values

    return wait


def prefetch(tensor_map):
    current().block.memory.tensor(tensor_map)


@functools.cache
def parameter(entry):
    def address():
        return MAPS

    return address


def _box(block, address, coordinates, writing=False):
    tensor_map, tensor, pointer = block.memory.tensor(address)
    if tensor is None:
        raise InstructionError(f"a box of an operand without elements, which lies nowhere: {tensor_map}")
    if len(coordinates) != tensor.ndim:
        raise InstructionError(
            f"{len(coordinates)} coordinates for a tensor map of {tensor.ndim} dimensions: {tensor_map}"
        )
    if writing:
        pointer.mark_written()
    elif pointer.unfinished:
        pointer.check_waited("is read")
    return tensor_map, tensor, tensor_map.box[::-1]


def _bytes(tensor_map):
    return 2 * int(np.prod(tensor_map.box))


def _alignment(tensor_map):
    return max(128, 8 * tensor_map.swizzle_bytes)
