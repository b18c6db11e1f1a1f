"""Twins of ptx.cluster. An address of the cluster is a block's number, from 1 on, above a shared address."""

import numpy as np

from .errors import InstructionError
from .now import current
from .registers import u32

ADDRESS_BITS = 24


def rank():
    return np.int32(current().block.rank)


def place_in(address, rank):
    rank = int(rank)
    if not 0 <= rank < len(current().turns.blocks):
        raise InstructionError(f"a cluster of {len(current().turns.blocks)} blocks has no block {rank}")
    return np.int32(rank + 1 << ADDRESS_BITS | int(address))


def there(thread, place):
    """(block, shared address in it) of an address of the cluster; a shared address is one of the thread's own block."""
    above, address = divmod(int(place), 1 << ADDRESS_BITS)
    return (thread.turns.blocks[above - 1] if above else thread.block), address


def sync():
    thread = current()
    thread.turns.sync(thread)


def store_b32(place, value):
    thread = current()
    block, address = there(thread, place)
    block.shared.store(address, [u32(value)], thread)


class _Arrival:
    """16 bytes on their way to a block; called when they come."""

    def __init__(self, block, address, values, words, mbarrier):
        self.block, self.address, self.values, self.words, self.mbarrier = block, address, values, words, mbarrier
        self.column, self.epoch = block.order.transfer(mbarrier.number)

    def __call__(self):
        if not self.block.alive:
            raise InstructionError(
                f"16 bytes come to block {self.block.rank} of the cluster, which has left the kernel"
            )
        shared = self.block.shared
        shared.data[self.address : self.address + 16].view(np.uint32)[:] = self.values
        shared.copied(self.words, self.column, self.epoch)
        self.mbarrier.transfer(-16, self.block, self.column, self.epoch)


def store_v4(place, values, at, barrier):
    from .mbarrier import find  # which imports this module

    thread = current()
    (block, address), (other, barrier) = there(thread, place), there(thread, barrier)
    if block is not other:
        raise InstructionError(
            f"16 bytes go to block {block.rank} of the cluster, their mbarrier is of block {other.rank}"
        )
    mbarrier, words = find(thread, barrier, block), block.shared.words(address, 16, 16)
    block.shared.start_copy(words, thread)
    values = values[at : at + 4].view(np.uint32).copy()
    block.transfers.append(_Arrival(block, address, values, words, mbarrier))
