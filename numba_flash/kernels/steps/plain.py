"""Plain arithmetic of other modules as device functions: the keys a query sees, the elements a lane holds.

They are here, not in the modules that use them, so that each is compiled once and not once for each user.
"""

from numba import int32

from ...problem import groups, ranges
from ...ptx import fragments, special
from . import dq_order
from .inlined import inlined

row_keys, key_tiles, key_queries = inlined(ranges.row_keys), inlined(ranges.key_tiles), inlined(ranges.key_queries)
key_tile_of, parts_before, ways_of = map(inlined, (dq_order.key_tile_of, dq_order.parts_before, dq_order.ways_of))
parts_of, part_of = inlined(groups.parts_of), inlined(groups.part_of)
first_row_of, first_column_of = inlined(fragments.row), inlined(fragments.column)
panel_offset, swizzled = inlined(fragments.panel_offset), inlined(fragments.swizzled)


@inlined
def chunk_pair(lane_address, pair, panel):
    """From a lane's address of the first two chunks of its row to that of the pair-th two: XOR by the swizzle."""
    return (lane_address ^ ((pair & 3) << 5)) + (pair >> 2) * panel


@inlined
def lane_and_warp():
    """Of this thread. Read anew at each call: so what follows from them is not kept in registers in between."""
    thread = special.thread_index()
    return thread & int32(31), thread >> int32(5)
