"""Nearly every file of kernels/ uses this. `inlined`, `named`, `nothing`, TRUE and FALSE help to make device functions.
`divide`, `tiles_of` and others compute numbers of rows and tiles. `first_row_of`, `panel_offset`, `lane_and_warp` and
others find a thread's part of a tile.

LLVM inlines device functions into their callers, after Numba has typed and lowered each by itself. Numba's own
inline="always" first makes one long function of everything and then types that; kernels then take up to three times as
long to compile.

Numba needs most of a kernel's compile time, and compiles each function once for each set of argument types. So a maker
of device functions returns the same ones for equal arguments (functools.cache), and arithmetic of other modules is
compiled here, not once for each user. A function with optional work takes TRUE or FALSE: for Python's own constants
Numba would compile it twice. LLVM drops the dead code as well.
"""

import collections
import functools

import numpy as np
from numba import config, cuda, int32, uint32

from ...problem import groups, ranges
from ...ptx import fragments, special
from . import dq_order

inlined = cuda.jit(device=True) if config.ENABLE_CUDASIM else cuda.jit(device=True, forceinline=True)
TRUE, FALSE = np.bool_(True), np.bool_(False)


@inlined
def nothing(*arguments):
    """Takes the place of a step that a dtype or an option does not need."""


def named(*functions, **others):
    """A NamedTuple of functions, under their own names, and of other values. A caller reads `made.load`, which is the
    function `load` in the maker's file: there its docstring says what it takes."""
    found = {function.__name__: function for function in functions} | others
    return _type(tuple(found))(**found)


@functools.cache
def _type(names: tuple[str, ...]):
    return collections.namedtuple("Functions", names)  # type: ignore[misc]


@inlined
def divide(x, y):
    """x // y in 32 bits, of numbers that are never negative. For signed 64-bit numbers, which Numba makes of Python's,
    it takes a hundred instructions."""
    return int32(uint32(x) // uint32(y))


@inlined
def tiles_of(rows, in_tile):
    """How many tiles of so many rows there are."""
    return divide(int32(rows) + int32(in_tile - 1), in_tile)


# The keys a query sees, the order of dQ's parts, the elements a lane holds.
row_keys, key_tiles, key_queries = inlined(ranges.row_keys), inlined(ranges.key_tiles), inlined(ranges.key_queries)
key_tile_of, parts_before, ways_of = map(inlined, (dq_order.key_tile_of, dq_order.parts_before, dq_order.ways_of))
parts_of, part_of, members_of = map(inlined, (groups.parts_of, groups.part_of, groups.members_of))
first_row_of, first_column_of = inlined(fragments.row), inlined(fragments.column)
panel_offset, swizzled = inlined(fragments.panel_offset), inlined(fragments.swizzled)


@inlined
def chunk_pair(lane_address, pair, panel):
    """The address of the pair-th two chunks of a row, from the lane's address of the first two: XOR by the swizzle."""
    return (lane_address ^ ((pair & 3) << 5)) + (pair >> 2) * panel


@inlined
def lane_and_warp():
    """The thread's lane and warp, read anew at each call: so no number made of them stays in a register."""
    thread = special.thread_index()
    return thread & int32(31), thread >> int32(5)
