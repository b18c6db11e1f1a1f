"""Twins of ptx.cluster. An address of the cluster is a block's number, from 1 on, above a shared address."""

import numpy as np

from .errors import InstructionError
from .now import current

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
