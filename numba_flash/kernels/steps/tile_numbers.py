"""The number of each tile of packed sequences, and the tile of each number, without a table and without the host.

Sequences follow each other, and each has as many numbers as its tiles may need. If sequence b begins at row r, its
tiles begin at number r // rows + b. So a sequence has enough numbers, and the last of them may have no tile.

cu_seqlens on a device may hold anything. In a backward a part of dQ waits for the parts of other key tiles, so two
tiles must never share a number, and each must be met. `search` in sequence.py therefore clamps each value between those
that a binary search has met before: then they never fall, and values that do not fall stay as they are.
"""

import functools
from typing import Any

from numba import int32

from ...ptx import special
from .inlined import inlined
from .integers import divide
from .named import named
from .sequence import search


@functools.cache
def make(config: Any, rows: int, of_keys: bool) -> Any:
    """rows: of a tile; of_keys: it is a tile of keys. -> device functions:

    count(sizes) -> how many numbers there are; sequence(number, arrays, strides, sizes) -> (b, its first number, its
    rows) of the sequence that has the number, without rows if none has it; at(number, arrays, strides, sizes) -> (b,
    the tile's first row in its sequence, or -1 if the number has no tile); first(b, row) -> the number of the first
    tile of sequence b, which begins at `row`.
    """

    @inlined
    def total_of(sizes):
        return sizes.total_k if of_keys else sizes.total_q

    @inlined
    def count(sizes):
        return divide(int32(total_of(sizes)), rows) + int32(sizes.batch)

    @inlined
    def sequence(number, arrays, strides, sizes):
        ends, stride, most = arrays.cu_seqlens_q, strides.cu_seqlens_q, sizes.seqlen_q
        if of_keys:
            ends, stride, most = arrays.cu_seqlens_k, strides.cu_seqlens_k, sizes.seqlen_k
        batch = special.opaque(int32(sizes.batch))  # else what follows from it would be kept in registers
        b, first_row, end = search(ends, stride, total_of(sizes), batch, int32(number), int32(rows))
        there = b >= 0 and b < batch
        return b, int32(first(b, first_row)), int32(min(end - first_row, most)) if there else int32(0)

    @inlined
    def at(number, arrays, strides, sizes):
        b, first_number, of_sequence = sequence(number, arrays, strides, sizes)
        row = int32((number - first_number) * rows)
        return (b, row) if row < of_sequence else (int32(0), int32(-1))

    @inlined
    def first(b, row):
        return divide(int32(row), rows) + int32(b)

    return named(count, sequence, at, first)
