"""The number of each tile of packed sequences, and the tile of each number, without a table and without the host.

Sequences follow each other, and each has as many numbers as its tiles may need. If sequence b begins at row r, its
tiles begin at number r // rows + b. So a sequence has enough numbers, and the last of them may have no tile.

cu_seqlens on a device may hold anything. In a backward a part of dQ waits for the parts of other key tiles, so two
tiles must never share a number, and each must be met. `search` in sequence.py therefore clamps each value between those
that a binary search has met before: then they never fall, and values that do not fall stay as they are.
"""

import functools
from typing import Any

from numba import int32, int64

from ...ptx import memory, special
from .basics import divide, inlined, named
from .sequence import first_position, packed_sequence, search, valid_keys


@functools.cache
def make(config: Any, rows: int, of_keys: bool) -> Any:
    """rows: of a tile; of_keys: it is a tile of keys. -> device functions:

    count(sizes) -> how many numbers there are; sequence(number, arrays, strides, sizes) -> (b, its first row, its rows)
    of the sequence that has the number, without rows if none has it; at(number, arrays, strides, sizes) -> (b, the
    tile's first row in its sequence, or -1 if the number has no tile); first(b, row) -> the number of the first tile of
    sequence b, which begins at `row`.
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
        return b, first_row, int32(min(end - first_row, most)) if there else int32(0)

    @inlined
    def at(number, arrays, strides, sizes):
        b, first_row, of_sequence = sequence(number, arrays, strides, sizes)
        row = int32((number - first(b, first_row)) * rows)
        return (b, row) if row < of_sequence else (int32(0), int32(-1))

    @inlined
    def first(b, row):
        return divide(int32(row), rows) + int32(b)

    return named(count, sequence, at, first)


@functools.cache
def halves(config: Any, rows: int, of_keys: bool) -> Any:
    """-> place_of(block, arrays, strides, sizes), for kernels with a block for 64 rows of each head's tiles: (its
    Sequence, head, first row in it, number of its 64 rows among a head's, count of these). If there is no such
    sequence, one without rows."""
    numbers, complete, parts = make(config, rows, of_keys), completer(config, of_keys), rows // 64

    @inlined
    def place_of(block, arrays, strides, sizes):
        count = int32(numbers.count(sizes) * parts)
        h = divide(block, count)
        half = int32(block - h * count)
        b, first, length = numbers.sequence(divide(half, parts), arrays, strides, sizes)
        first_row = int64(half - numbers.first(b, first) * parts) * 64
        sequence = complete(b if length > 0 else int32(0), first, length, arrays, strides, sizes)
        return sequence, h, first_row, half, count

    return place_of


@functools.cache
def completer(config: Any, of_keys: bool) -> Any:
    """-> complete(b, first, rows, arrays, strides, sizes): the Sequence b, as sequence.py makes it, of which it
    is known where its keys, or else its queries, begin, and how many there are. A search takes long, and is left out
    where queries and keys begin at the same places."""
    keys_of, q_start_of = valid_keys(config), first_position(config)

    @inlined
    def of_other_side(b, first, rows, arrays, strides, sizes):
        q_ends, k_ends = arrays.cu_seqlens_q, arrays.cu_seqlens_k
        same = memory.address(q_ends, 0) == memory.address(k_ends, 0) and strides.cu_seqlens_q == strides.cu_seqlens_k
        if same and sizes.total_q == sizes.total_k and sizes.seqlen_q == sizes.seqlen_k:
            return int64(first), int64(rows)
        ends, stride, total, most = k_ends, strides.cu_seqlens_k, sizes.total_k, sizes.seqlen_k
        if of_keys:
            ends, stride, total, most = q_ends, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q
        _, other, end = search(ends, stride, total, special.opaque(int32(sizes.batch)), int32(b), int32(0))
        return int64(other), min(int64(end - other), most)

    @inlined
    def complete(b, first, rows, arrays, strides, sizes):
        other_first, other_rows = of_other_side(b, first, rows, arrays, strides, sizes)
        first_query, queries = (other_first, other_rows) if of_keys else (int64(first), int64(rows))
        first_key, keys = (int64(first), int64(rows)) if of_keys else (other_first, other_rows)
        keys = keys_of(b, keys, arrays, strides)
        q_start = q_start_of(b, queries, keys, arrays, strides, sizes)
        return packed_sequence(b, queries, keys, q_start, first_query, first_key, sizes)

    return complete
