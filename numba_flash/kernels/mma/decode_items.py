"""What a block of decode does now and next: two Items (decode_work.py) in shared memory, so that the copies of the next
one start before the current one ends.

A block's first item has the block's number. It claims the number of each further one while the item before it begins,
from a counter that all blocks share: so a block that gets less of the memory's bandwidth does fewer. Each number is
claimed once, and each block also claims one that has no item; whoever gets the last number leaves the counter at zero.
"""

from numba import int32, int64, uint32

from ...ptx import ld_st, local, memory, special
from ..steps.inlined import inlined
from ..steps.named import named
from .decode_work import Cursor, Item

WORDS, TIME, CLAIMED, CURSOR = 16, 32, 36, 40  # of an item: its own, and what stands behind them, in bytes


def make(config):
    """-> device functions: claim, put_claimed, claimed, put, get."""
    counter = config.most_nodes  # behind those of row tiles

    @inlined
    def place(index, items):
        return int32(items + (index & 1) * (4 * WORDS))

    @inlined
    def claim(thread, arrays):
        """-> a number, of thread 0. Nothing here waits for it."""
        number = uint32(0)
        if thread == 0:
            number = memory.add(memory.address(arrays.counters, int64(counter)), uint32(1))
        return int32(number + uint32(special.block_count()))

    @inlined
    def put_claimed(thread, number, index, items):
        """Notes the number that follows the index-th item; behind a barrier the others see it."""
        if thread == 0:
            ld_st.store_b32(int32(place(index, items) + CLAIMED), uint32(number))

    @inlined
    def claimed(index, items):
        """-> (the number that follows the index-th item, where to look for it)."""
        at = place(index, items)
        cursor = Cursor(
            int32(ld_st.load_b32(int32(at + CURSOR))), int32(ld_st.load_b32(int32(at + CURSOR + 4))),
            int32(ld_st.load_b32(int32(at + CURSOR + 8))),
        )  # fmt: skip
        return int32(ld_st.load_b32(int32(at + CLAIMED))), cursor

    @inlined
    def put(item, time, number, cursor, index, items, thread, arrays):
        """Notes the block's index-th item, which has this number. time: of its first tile."""
        if thread == 0:
            words, at = local.array(8, uint32), place(index, items)
            words[0], words[1], words[2], words[3] = item.b, item.h_kv, item.row_tile, item.node
            words[4], words[5], words[6], words[7] = item.nodes, item.node_slot, item.row_tiles, item.first_node
            ld_st.store_v4(at, words, 0)
            ld_st.store_v4(int32(at + 16), words, 4)
            ld_st.store_b32(int32(at + TIME), uint32(time))
            ld_st.store_b32(int32(at + CURSOR), uint32(cursor.whole))
            ld_st.store_b32(int32(at + CURSOR + 4), uint32(cursor.first))
            ld_st.store_b32(int32(at + CURSOR + 8), uint32(cursor.before))
            if item.b < 0 and number - special.block_count() == cursor.before - 1:  # the last of all numbers
                memory.exchange(memory.address(arrays.counters, int64(counter)), uint32(0))

    @inlined
    def get(index, items):
        """-> (the index-th item, the time of its first tile)."""
        words, at = local.array(8, uint32), place(index, items)
        ld_st.load_v4(words, 0, at)
        ld_st.load_v4(words, 4, int32(at + 16))
        item = Item(
            int32(words[0]), int32(words[1]), int32(words[2]), int32(words[3]), int32(words[4]), int32(words[5]),
            int32(words[6]), int32(words[7]),
        )  # fmt: skip
        return item, int32(ld_st.load_b32(int32(at + TIME)))

    return named(claim, put_claimed, claimed, put, get)
