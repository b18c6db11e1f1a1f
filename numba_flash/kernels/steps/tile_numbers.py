"""The number of each tile of packed sequences, and the tile of each number, without a table and without the host.

Sequences follow each other, and each has as many numbers as its tiles may need. If sequence b begins at row r, its
tiles begin at number r // rows + b: so it has one number more than rows // rows, and that is enough. The last of its
numbers may have no tile. Where the longest sequence needs few tiles, each sequence has as many numbers as that one.

cu_seqlens on a device may hold anything. In a backward a part of dQ waits for the parts of other key tiles, so two
tiles must never share a number, and each must be met. `search` in sequence.py therefore clamps each value between those
that a binary search has met before: then they never fall, and values that do not fall stay as they are.
"""

import functools
from typing import Any

from numba import cuda, int32, int64

from .inlined import inlined
from .integers import divide, tiles_of
from .named import named
from .sequence import search


@functools.cache
def make(config: Any, rows: int, of_keys: bool) -> Any:
    """rows: of a tile; of_keys: it is a tile of keys. -> device functions:

    count(sizes) -> how many numbers there are; at(number, arrays, strides, sizes) -> (b, the tile's first row in its
    sequence, which may be behind the last or below 0: then it is no tile); first(b, row, sizes) -> the number of the
    first tile of sequence b, which begins at `row`.
    """
    @inlined
    def total_of(sizes):
        return sizes.total_k if of_keys else sizes.total_q

    @inlined
    def of_longest(sizes):
        return tiles_of(sizes.seqlen_k if of_keys else sizes.seqlen_q, rows)

    @inlined
    def of_rows(sizes):
        """How many numbers there are if they follow from the rows."""
        return divide(int32(total_of(sizes)), rows) + int32(sizes.batch)

    @inlined
    def alike(sizes):
        return int64(sizes.batch) * of_longest(sizes) <= of_rows(sizes)

    @inlined
    def count(sizes):
        return int32(sizes.batch) * of_longest(sizes) if alike(sizes) else of_rows(sizes)

    @cuda.jit(device=True)
    def at(number, arrays, strides, sizes):
        if alike(sizes):
            each = of_longest(sizes)
            b = divide(number, each)
            return b, int32((number - b * each) * rows)
        ends, stride = arrays.cu_seqlens_q, strides.cu_seqlens_q
        if of_keys:
            ends, stride = arrays.cu_seqlens_k, strides.cu_seqlens_k
        found, first_row, _ = search(ends, stride, total_of(sizes), int64(sizes.batch), int64(number), int64(rows))
        b = int32(found)
        return b, int32((number - divide(int32(first_row), rows) - b) * rows)

    @inlined
    def first(b, row, sizes):
        return int32(b) * of_longest(sizes) if alike(sizes) else divide(int32(row), rows) + int32(b)

    return named(count, at, first)
