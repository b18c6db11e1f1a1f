"""Stand-ins for ptx.cluster."""

import numpy as np

from .errors import InstructionError
from .mbarrier import find
from .now import current
from .numbers import int32
from .places import ADDRESS_BITS, there
from .registers import u32
from .tma import BytesArrival


def rank():
    return int32(current().block.rank)


def place_in(address, rank):
    rank = int(rank)
    if not 0 <= rank < len(current().turns.blocks):
        raise InstructionError(f"a cluster of {len(current().turns.blocks)} blocks has no block {rank}")
    return int32(rank + 1 << ADDRESS_BITS | int(address))


def sync():
    thread = current()
    return thread.turns.sync(thread)


def store_b32(place, value):
    thread = current()
    block, address = there(thread, place)
    block.shared.store(address, u32(value).tobytes(), thread)


def store_v4(place, values, at, barrier):
    thread = current()
    (block, address), (other, barrier) = there(thread, place), there(thread, barrier)
    if block is not other:
        raise InstructionError(
            f"16 bytes go to block {block.rank} of the cluster, their mbarrier is of block {other.rank}"
        )
    mbarrier, words = find(thread, barrier, block), block.shared.words(address, 16, 16)
    block.shared.start_copy(words, thread)
    data = values[at : at + 4].copy().view(np.uint8)
    block.transfers.append(BytesArrival(block, address, data, words, mbarrier))
