"""Where a batch entry's rows are, how many of them count, and which tiles of them a block visits.

A kernel makes a `Sequence` once for each work item. Every address of a row, every index of a number that each query
has, and every range of tiles comes from it, in this file. So another way to find rows is a change of this file.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int32, int64

from .basics import divide, inlined, key_queries, key_tiles, row_keys


class Sequence(NamedTuple):
    """Batch entry b: how many queries it has, how many of its keys are valid, and the position of query 0 among
    them. And where its rows are, if sequences are packed (problem/packed.py); the constants that others have cost
    nothing."""

    b: int
    seqlen_q: int
    keys: int
    q_start: int
    entry: int  # in the arrays: b, or 0 of packed sequences
    first_query: int  # its first row in q, o and the like, and in numbers that each query has; 0 without packing
    first_key: int  # likewise in k and v
    rows: int  # such numbers of a head: seqlen_q, or those of all packed sequences
    count: int  # of packed sequences, which share these; 0 without packing


class Query(NamedTuple):
    """Query q_index of a head, at position q_pos among the keys, and the keys [first_key, end_key) that causal, window
    and lengths leave it."""

    b: int
    h: int
    q_index: int
    q_pos: int
    first_key: int
    end_key: int


class QueryTile(NamedTuple):
    """The query tile that a block, or a consumer, processes. b, h: the batch entry and the first query head. part:
    which columns of O, if blocks share them."""

    b: int
    h: int
    first_query: int
    part: int


class QueryWork(NamedTuple):
    """A QueryTile with its sequence, and with the head of K and V."""

    sequence: Any
    h: int
    h_kv: int
    first_query: int
    part: int


@functools.cache
def make(config: Any) -> Any:
    """-> sequence_of(b, arrays, strides, sizes): the Sequence of batch entry b. Unused fields cost nothing."""
    keys_of, q_start_of, span = valid_keys(config), first_position(config), span_of(config)

    @cuda.jit(device=True)
    def sequence_of(b, arrays, strides, sizes):
        if not config.packed:
            keys = keys_of(b, sizes.seqlen_k, arrays, strides)
            return unpacked(b, sizes.seqlen_q, keys, q_start_of(b, sizes.seqlen_q, keys, arrays, strides, sizes))
        first_query, queries = span(arrays.cu_seqlens_q, b, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q, sizes)
        first_key, keys = span(arrays.cu_seqlens_k, b, strides.cu_seqlens_k, sizes.total_k, sizes.seqlen_k, sizes)
        keys = keys_of(b, keys, arrays, strides)
        q_start = q_start_of(b, queries, keys, arrays, strides, sizes)
        return packed_sequence(b, queries, keys, q_start, first_query, first_key, sizes)

    return sequence_of


@functools.cache
def valid_keys(config: Any) -> Any:
    """-> keys_of(b, room, arrays, strides): how many of the `room` keys of batch entry b are valid."""
    has_seqlens_k = config.has("seqlens_k")

    @inlined
    def keys_of(b, room, arrays, strides):
        if has_seqlens_k:
            # Clamped: the lengths are on the device, where the host cannot check them without waiting.
            return min(max(int64(arrays.seqlens_k[b * strides.seqlens_k]), 0), room)
        return room

    return keys_of


@functools.cache
def first_position(config: Any) -> Any:
    """-> q_start_of(b, queries, keys, arrays, strides, sizes): the position of query 0 among the keys."""
    source = config.q_offset_source
    from_keys, from_both, from_array = source == "seqlens_k", source == "sequence", source == "array"

    @inlined
    def q_start_of(b, queries, keys, arrays, strides, sizes):
        q_start = sizes.q_offset
        if from_keys:
            q_start = q_start + keys
        if from_both:
            q_start = q_start + keys - queries
        if from_array:
            q_start = q_start + int64(arrays.q_offset[b * strides.q_offset])
        return q_start

    return q_start_of


@inlined
def unpacked(b, seqlen_q, keys, q_start):
    """A Sequence whose rows are those of batch entry b."""
    return Sequence(b, seqlen_q, keys, q_start, b, int64(0), int64(0), seqlen_q, int64(0))


@inlined
def packed_sequence(b, queries, keys, q_start, first_query, first_key, sizes):
    """A Sequence whose rows begin at first_query and first_key."""
    return Sequence(b, queries, keys, q_start, int64(0), first_query, first_key, sizes.total_q, sizes.batch)


@inlined
def packed_queries(b, first, count, sizes):
    """The same, for a kernel that looks at no key."""
    return packed_sequence(b, int64(count), int64(0), int64(0), int64(first), int64(0), sizes)


@inlined
def span(ends, b, stride, total, most, sizes):
    """-> (first row, number of rows) of a packed sequence. Clamped, as lengths are: whatever `ends` has, they are rows
    that exist."""
    first = min(max(int64(ends[b * stride]), 0), total)
    return first, min(max(min(int64(ends[(b + 1) * stride]), total) - first, 0), most)


def span_of(config: Any) -> Any:
    """-> `span`, or in a backward `span_in_order`: there two sequences never share a row."""
    return span_in_order if config.in_order else span


@inlined
def span_in_order(ends, b, stride, total, most, sizes):
    """`span` where values of `ends` that fall are clamped, too (tile_numbers.py)."""
    _, first, end = search(ends, stride, total, int32(sizes.batch), int32(b), int32(0))
    return int64(first), min(int64(end - first), most)


@cuda.jit(device=True)
def search(ends, stride, total, batch, number, rows):
    """-> (b, first row, end) of the packed sequence b = number; or, if rows is not 0, of the one that has the tile of
    this number (tile_numbers.py), where -1 and batch are none. A binary search: each value is clamped to those that
    were met before."""
    low, high = int32(0), int32(min(total, 2**31 - 1))
    b, behind = int32(-1), int32(batch + 1)
    while int32(behind - b) > 1:
        middle = int32(b + behind) >> int32(1)
        end = int32(min(max(int32(ends[middle * stride]), low), high))
        at = int32(middle + divide(end, rows)) if rows > 0 else middle
        if number >= at:
            b, low = middle, end
        else:
            behind, high = middle, end
    return b, low, high


@functools.cache
def again(config: Any) -> Any:
    """-> sequence_again(b, keys, q_start, arrays, strides, sizes): the Sequence of which a kernel has kept these. Where
    a packed one's rows are is read again."""
    sequence_of, packed = make(config), config.packed

    @inlined
    def sequence_again(b, keys, q_start, arrays, strides, sizes):
        return sequence_of(b, arrays, strides, sizes) if packed else unpacked(b, sizes.seqlen_q, keys, q_start)

    return sequence_again


@functools.cache
def queries(config: Any) -> Any:
    """-> queries_of(b, arrays, strides, sizes): the Sequence of batch entry b, for a kernel that looks at no key."""
    span = span_of(config)

    @inlined
    def queries_of(b, arrays, strides, sizes):
        if not config.packed:
            return unpacked(b, sizes.seqlen_q, int64(0), int64(0))
        first, count = span(arrays.cu_seqlens_q, b, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q, sizes)
        return packed_queries(b, first, count, sizes)

    return queries_of


@inlined
def query_of(sequence, h, q_index, sizes):
    """-> Query q_index of head h. It may lie past the last one: then its keys mean nothing."""
    q_pos = q_index + sequence.q_start
    first_key, end_key = row_keys(q_pos, sizes.left, sizes.right, sequence.keys)
    return Query(sequence.b, h, q_index, q_pos, first_key, end_key)


@inlined
def query_row(strides, sequence, h, row):
    """Element index at which row `row` of a head begins, in an array that has a row for each query: q, o, do or dq.
    strides: (batch, head, row, column)."""
    return sequence.entry * strides[0] + h * strides[1] + (row + sequence.first_query) * strides[2]


@inlined
def key_row(strides, sequence, h_kv, row):
    """The same in an array that has a row for each key: k, v, dk or dv."""
    return sequence.entry * strides[0] + h_kv * strides[1] + (row + sequence.first_key) * strides[2]


@inlined
def kv_head(h, sizes):
    """The head of K and V that query head h reads."""
    return divide(h, divide(sizes.heads, sizes.heads_kv))


@inlined
def lse_row(sequence, h, q_index, sizes):
    """Index of a query's lse, of its delta and of all else that has one number for a query: (batch, heads,
    seqlen_q), or (heads, rows) of packed sequences."""
    return (int64(sequence.entry) * sizes.heads + h) * sequence.rows + (q_index + sequence.first_query)


@inlined
def key_range(sequence, first_query, last_query, sizes, tile_n):
    """The tiles of `tile_n` keys that queries first_query to last_query see, as in ranges.key_tiles.

    -> (begin, free, cut, stop): a query sees some of the tiles [begin, stop), and all of them see [free, cut) whole.
    """
    first_pos, last_pos = first_query + sequence.q_start, last_query + sequence.q_start
    first_begin, first_end = row_keys(first_pos, sizes.left, sizes.right, sequence.keys)
    last_begin, last_end = row_keys(last_pos, sizes.left, sizes.right, sequence.keys)
    return key_tiles(first_begin, first_end, last_begin, last_end, tile_n)


@inlined
def query_range(sequence, first_key, last_key, sizes, tile_m):
    """The tiles of `tile_m` queries that see keys first_key to last_key: `key_range` from the keys' side."""
    queries = sequence.seqlen_q
    first_begin, first_end = key_queries(first_key, sequence.q_start, sizes.left, sizes.right, queries)
    last_begin, last_end = key_queries(last_key, sequence.q_start, sizes.left, sizes.right, queries)
    return key_tiles(first_begin, first_end, last_begin, last_end, tile_m)
