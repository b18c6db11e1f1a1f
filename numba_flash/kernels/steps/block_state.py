"""Numbers that a block computes once and its threads need for every tile: 16-byte notes in shared memory.

In registers they would displace accumulators. Computed again for each tile, the divisions that find a block's head
alone take as long as a third of the products of a small tile (H200). Reading a note takes a while; before a barrier it
costs nothing.
"""

from numba import int32, int64, uint32

from ...ptx import ld_st, local
from .basics import inlined

SIZE = 16  # bytes of a note


@inlined
def put(address, x, y):
    """Stores two int64 at a shared address, a multiple of 16. Called by one thread, before a barrier."""
    low = int64(0xFFFFFFFF)
    ld_st.store_b32(address, uint32(x & low))
    ld_st.store_b32(address + 4, uint32((x >> 32) & low))
    ld_st.store_b32(address + 8, uint32(y & low))
    ld_st.store_b32(address + 12, uint32((y >> 32) & low))


@inlined
def get(address):
    """-> the two int64 that `put` stored there."""
    four = local.array(4, uint32)
    ld_st.load_v4(four, 0, address)
    return int64(four[0]) | int64(four[1]) << 32, int64(four[2]) | int64(four[3]) << 32


@inlined
def put_range(address, first, end):
    """Stores two int32 at a shared address, a multiple of 8."""
    ld_st.store_b32(address, uint32(first))
    ld_st.store_b32(address + 4, uint32(end))


@inlined
def get_range(address):
    """-> the two int32 that `put_range` stored there."""
    return int32(ld_st.load_b32(address)), int32(ld_st.load_b32(address + 4))
