"""Writes the gradients of a tile in 16 bits: dK and dV from a block with keys, dQ from a block with queries. Rows that
are not finite are computed again.

dK and dQ are multiplied by scale. Where weights are dropped, dV is multiplied by how often a kept weight counts.
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import local, memory, special
from ..recompute import keys as recompute_keys, queries as recompute_queries
from ..steps import row_writers
from ..steps.basics import divide, inlined
from ..steps.sequence import QueryTile, key_row, query_row
from . import block
from .backward_work import head_parts_of
from .block import FIRST_ROW, H_KV, PART, B, H, rows_of_lane


def key_rows(config, rows):
    """-> write, a device function. rows: keys of the tile."""
    store_dk, store_dv = (
        row_writers.of_gradient(config.dtype, 16, -(-columns // 16) * 2, columns % 8 == 0)
        for columns in (config.head_dim, config.head_dim_v)
    )
    recompute, drops = recompute_keys.make(config, config.of_dk, config.of_dv), config.seeded

    @inlined
    def write(acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score):
        """A warp writes its rows of the tile at first_key; the first of them is first_row."""
        first = first_key + first_row
        keys_left = int32(min(sequence.keys - first_key, rows)) - first_row
        rows_left = keys_left  # outside.py writes what is behind the valid keys of packed sequences
        if not config.packed:
            rows_left = int32(min(sizes.seqlen_k - first_key, rows)) - first_row
        nonfinite, left = uint32(0), (int32(rows_left), int32(keys_left))
        if config.of_dk:
            to, row = key_row(strides.dk, sequence, h_kv, first), strides.dk[2]
            nonfinite |= store_dk(acc_dk, score.scale, lane, arrays.dk, to, row, *left, int32(config.head_dim))
        if config.of_dv:
            to, row = key_row(strides.dv, sequence, h_kv, first), strides.dv[2]
            kept_count = score.kept_count if drops else float32(1)
            nonfinite |= store_dv(acc_dv, kept_count, lane, arrays.dv, to, row, *left, int32(config.head_dim_v))
        if nonfinite != 0:
            recompute(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return write


def of_keys(config):
    """-> write_gradients, a device function of a consumer warpgroup of a block that owns keys."""
    tile_n, sequence_of, word = config.tile_n, block.sequence_of_work(config), block.state_of(config).read
    write_outputs = key_rows(config, tile_n)

    @inlined
    def leave_sums(own, acc, blocks, sums, sizes):
        """Stores acc (blocks, 4), in the layout of the registers, where add_parts reads it."""
        four, thread = local.array(4, uint32), special.thread_index() - 128
        tiles = divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n)
        all_parts = int64(word(own, B) * head_parts_of(sizes, config.members) + word(own, PART))
        tile = (all_parts * tiles + divide(word(own, FIRST_ROW), tile_n)) * (tile_n // 64) + (thread >> int32(7))
        at = (tile * blocks * 128 + (thread & int32(127))) * 4
        for column in range(blocks):
            for x in range(4):
                four[x] = acc[4 * column + x].view(np.uint32)
            memory.store_v4(memory.address(sums, at + column * 512), four, 0)

    @inlined
    def write_gradients(own, acc_dk, acc_dv, arrays, strides, sizes, score):
        """Writes dK and dV, or their sums if other blocks have other heads of the group."""
        if config.members:
            if config.of_dk:
                leave_sums(own, acc_dk, config.head_dim_padded // 8, arrays.dk_sums, sizes)
            if config.of_dv:
                leave_sums(own, acc_dv, config.head_dim_v_padded // 8, arrays.dv_sums, sizes)
        else:
            sequence = sequence_of(own, arrays, strides, sizes)
            place_of_tile = sequence, word(own, H_KV), word(own, FIRST_ROW)
            write_outputs(acc_dk, acc_dv, *rows_of_lane(), *place_of_tile, arrays, strides, sizes, score)

    return write_gradients


def of_queries(config):
    """-> write(base, acc_dq, arrays, strides, sizes, score), a device function of a consumer warpgroup of a block that
    owns queries."""
    tile_m, head_dim = config.tile_m, config.head_dim
    word, queries_of = block.state_of(config).read, block.sequence_of_work(config, queries=True)
    store = row_writers.of_gradient(config.dtype, 16, -(-head_dim // 16) * 2, head_dim % 8 == 0)
    recompute = recompute_queries.make(config)

    @inlined
    def write(base, acc_dq, arrays, strides, sizes, score):
        """A warp writes its rows of dQ."""
        first_row, lane = rows_of_lane()
        own = QueryTile(word(base, B), word(base, H), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(base, arrays, strides, sizes)
        left = int32(min(sequence.seqlen_q - own.first_query, tile_m) - first_row)
        to, row = query_row(strides.dq, sequence, own.h, own.first_query + first_row), strides.dq[2]
        nonfinite = store(acc_dq, score.scale, lane, arrays.dq, to, row, left, left, int32(head_dim))
        if nonfinite != 0:
            recompute(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    return write
