"""S = Q K^T and dP = dO V^T of a sequence of tiles, of any batch entries, heads, queries and keys.

backward_dbias.py and backward_daux.py share it. A block loops over the tiles of a Range. Q, dO, K and V have one place
each in shared memory. When the products of a tile are done, the next tile is loaded while the block finishes the
scores. A tile that shares its queries or its keys with the previous one keeps them.
"""

from typing import Any, NamedTuple

from numba import int32, int64

from ...ptx import memory
from ..steps import async_tiles, fragment_products
from ..steps import sequence as sequences
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.named import named
from ..steps.sequence import key_range, key_row, query_row, unpacked


class Range(NamedTuple):
    """Units [unit, end_unit) of a box of query tiles, and the half-open range of key tiles in each. A unit is one query
    tile of one head of one batch entry; the box has `heads` heads of `tiles` query tiles each, from (b, h, i) on."""

    b: int
    h: int
    i: int
    heads: int
    tiles: int
    unit: int
    end_unit: int
    j: int
    end_j: int


class Place(NamedTuple):
    """A tile of a Range: query tile i of head h of a batch entry, the unit-th, and key tile j below stop."""

    unit: int
    sequence: Any
    h: int
    i: int
    j: int
    stop: int


class Smem(NamedTuple):
    """Shared addresses."""

    q: int
    do: int
    k: int
    v: int


def make(config):
    load_q, load_do, load_k, load_v = (
        async_tiles.loader(rows, columns, config.threads, copy_bytes=config.copy_bytes)
        for rows in (config.tile_m, config.tile_n)
        for columns in (config.head_dim_padded, config.head_dim_v_padded)
    )
    sequence_of = sequences.make(config)
    products = fragment_products.make(config)
    multiply_q_k, multiply_do_v = map(products.scores_product, (config.head_dim_padded, config.head_dim_v_padded))

    @inlined
    def seek(unit, tiles, arrays, strides, sizes):
        """The first tile that some query sees, from this unit on."""
        h, i, j, stop = int32(0), int32(0), int32(0), int32(0)
        sequence = unpacked(int32(0), sizes.seqlen_q, int64(0), int64(0))
        while unit < tiles.end_unit:
            head_of_all = divide(unit, tiles.tiles)
            entry = divide(head_of_all, tiles.heads)
            h, i = int32(tiles.h + head_of_all - entry * tiles.heads), int32(tiles.i + unit - head_of_all * tiles.tiles)
            sequence = sequence_of(int32(tiles.b + entry), arrays, strides, sizes)
            last_query = min(int64(i * config.tile_m + config.tile_m), sequence.seqlen_q) - 1
            begin, _, _, end = key_range(sequence, i * config.tile_m, last_query, sizes, config.tile_n)
            j, stop = max(int32(begin), tiles.j), min(int32(end), tiles.end_j)
            if j < stop:
                break
            unit = int32(unit + 1)
        return Place(unit, unpacked(sequence.b, sequence.seqlen_q, sequence.keys, sequence.q_start), h, i, j, stop)

    @inlined
    def first(tiles, arrays, strides, sizes):
        return seek(tiles.unit, tiles, arrays, strides, sizes)

    @inlined
    def following(place, tiles, arrays, strides, sizes):
        """-> Place; its unit is tiles.end_unit after the last."""
        unit, sequence, h, i, j, stop = place
        j = int32(j + 1)
        if j >= stop:
            unit, sequence, h, i, j, stop = seek(int32(unit + 1), tiles, arrays, strides, sizes)
        return Place(unit, sequence, h, i, j, stop)

    @inlined
    def load_queries(place, smem, arrays, strides, sizes, thread):
        first_query = int64(place.i) * config.tile_m
        left = int32(min(place.sequence.seqlen_q - first_query, config.tile_m))
        q_global = memory.address(arrays.q, query_row(strides.q, place.sequence, place.h, first_query))
        do_global = memory.address(arrays.do, query_row(strides.do, place.sequence, place.h, first_query))
        load_q(smem.q, q_global, 2 * strides.q[2], 0, left, config.head_dim, thread)
        load_do(smem.do, do_global, 2 * strides.do[2], 0, left, config.head_dim_v, thread)

    @inlined
    def load_keys(place, h_kv, smem, arrays, strides, thread):
        first_key = int64(place.j) * config.tile_n
        left = int32(place.sequence.keys - first_key)
        k_global = memory.address(arrays.k, key_row(strides.k, place.sequence, h_kv, first_key))
        v_global = memory.address(arrays.v, key_row(strides.v, place.sequence, h_kv, first_key))
        load_k(smem.k, k_global, 2 * strides.k[2], 0, left, config.head_dim, thread)
        load_v(smem.v, v_global, 2 * strides.v[2], 0, left, config.head_dim_v, thread)

    @inlined
    def load_first(place, smem, arrays, strides, sizes, thread):
        """Starts the copies of a tile."""
        load_queries(place, smem, arrays, strides, sizes, thread)
        h_kv = divide(place.h, divide(sizes.heads, sizes.heads_kv))
        load_keys(place, h_kv, smem, arrays, strides, thread)

    @inlined
    def load_next(place, before, smem, arrays, strides, sizes, thread):
        """Likewise, of what the tile does not share with the one before."""
        group = divide(sizes.heads, sizes.heads_kv)
        h_kv = divide(place.h, group)
        if place.i != before.i or place.h != before.h or place.sequence.b != before.sequence.b:
            load_queries(place, smem, arrays, strides, sizes, thread)
        if place.j != before.j or h_kv != divide(before.h, group) or place.sequence.b != before.sequence.b:
            load_keys(place, h_kv, smem, arrays, strides, thread)

    @inlined
    def multiply(registers, smem, thread):
        """acc_s, acc_dp += the products."""
        own_lane, other_lane, _ = products.lanes(thread)
        multiply_q_k(registers.acc_s, registers.q_frag, registers.b_frag, smem.q + own_lane, smem.k + other_lane)
        multiply_do_v(registers.acc_dp, registers.do_frag, registers.b_frag, smem.do + own_lane, smem.v + other_lane)

    frag_words = config.head_dim_padded // 4, config.head_dim_v_padded // 4  # of registers.q_frag and do_frag
    return named(first, following, load_first, load_next, multiply, frag_words=frag_words)
