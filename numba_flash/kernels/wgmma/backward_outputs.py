"""Writes the gradients of a tile in 16 bits: dK and dV from a block with keys, dQ from a block with queries. Rows that
are not finite are computed again.

dK and dQ are multiplied by scale. Where weights are dropped, dV is multiplied by how often a kept weight counts.
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import bar, local, memory, special
from ..recompute import keys as recompute_keys, queries as recompute_queries
from ..steps import gradient_rows, tile_numbers
from ..steps.basics import divide, inlined, members_of, parts_of, tiles_of
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import QueryTile, key_row, query_row
from . import block
from .backward_work import head_parts_of
from .block import FIRST_KEY, FIRST_ROW, H_KV, KEYS, MEMBERS, PART, B, H, rows_of_lane


def key_rows(config, rows, dk_at, dv_at):
    """-> write, a device function. rows: keys of the tile; dk_at, dv_at: where in shared memory the gradients are
    staged, in bytes from `base`."""
    stage_dk, store_dk = gradient_rows.make(config.dtype, rows, 16, config.head_dim, config.head_dim % 8 == 0)
    stage_dv, store_dv = gradient_rows.make(config.dtype, rows, 16, config.head_dim_v, config.head_dim_v % 8 == 0)
    recompute, drops = recompute_keys.make(config, config.of_dk, config.of_dv), config.seeded
    in_turn, warp_sync = config.of_dk and config.of_dv and dk_at == dv_at, bar.warp_sync

    @inlined
    def write(base, acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score):
        """A warp writes its rows of the tile at first_key; the first of them is first_row."""
        keys_left = int32(min(sequence.keys - first_key, rows))
        rows_left = keys_left  # outside.py writes what is behind the valid keys of packed sequences
        if not config.packed:
            rows_left = int32(min(sizes.seqlen_k - first_key, rows))
        nonfinite = uint32(0)
        kept_count = score.kept_count if drops else float32(1)
        if config.of_dk:
            nonfinite |= stage_dk(acc_dk, score.scale, base + dk_at, first_row, lane, keys_left)
        if config.of_dv and not in_turn:
            nonfinite |= stage_dv(acc_dv, kept_count, base + dv_at, first_row, lane, keys_left)
        if config.of_dk:
            to, row = key_row(strides.dk, sequence, h_kv, first_key), strides.dk[2]
            store_dk(base + dk_at, first_row, lane, arrays.dk, to, row, rows_left, config.head_dim, nonfinite)
        if in_turn:
            warp_sync()  # all lanes have read dK
            nonfinite |= stage_dv(acc_dv, kept_count, base + dv_at, first_row, lane, keys_left)
        if config.of_dv:
            to, row = key_row(strides.dv, sequence, h_kv, first_key), strides.dv[2]
            store_dv(base + dv_at, first_row, lane, arrays.dv, to, row, rows_left, config.head_dim_v, nonfinite)
        if nonfinite != 0:
            recompute(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    return write


def of_keys(config):
    """-> write_gradients, a device function of a consumer warpgroup of a block that owns keys."""
    plan, tile_n, sequence_of = config.shared_layout(), config.tile_n, block.sequence_of_work(config)
    members, packed = config.members, config.packed
    numbers = tile_numbers.make(config, tile_n, True) if packed else None
    word = block.state_of(config).read
    # If the next K and V arrive meanwhile, dK and dV are staged in the place of dS. Up to 64 columns they lie side by
    # side in one of its two buffers; above that one follows the other, each with a panel in both buffers.
    places = (plan.own_a, plan.own_b if config.of_dk else plan.own_a)
    if config.stays:
        places = (plan.ds, plan.ds + 64 * 128 if config.dq_panels == 1 else plan.ds)
    write_outputs, in_line, warp_sync = key_rows(config, tile_n, *places), config.parts_in_line, bar.warp_sync
    dk_blocks, dv_blocks = config.head_dim_padded // 8, config.head_dim_v_padded // 8
    # Two parts in line share sums and a counter, which is behind those of dQ.
    sharing, head_word = (0, H_KV) if in_line else (config.members, PART)

    @inlined
    def tile_of(own, sizes):
        """The number of the key tile among those of all groups or parts that have sums."""
        number = divide(word(own, FIRST_ROW), tile_n)
        if packed:
            group, h_kv = divide(sizes.heads, sizes.heads_kv), word(own, H_KV)
            head = int64(h_kv * parts_of(group, members) + divide(word(own, H) - h_kv * group, members))
            return head * numbers.count(sizes) + number + numbers.first(word(own, B), word(own, FIRST_KEY))
        head = int64(word(own, B) * head_parts_of(sizes, sharing) + word(own, head_word))
        return head * tiles_of(sizes.seqlen_k, tile_n) + number

    @inlined
    def sums_at(own, blocks, sizes):
        """Where the thread's sums of `blocks` times 8 columns begin, in the layout of the registers."""
        thread = special.thread_index() - 128
        tile = tile_of(own, sizes) * (tile_n // 64) + (thread >> int32(7))
        return (tile * blocks * 128 + (thread & int32(127))) * 4

    @inlined
    def leave_sums(own, acc, blocks, sums, sizes):
        """Stores acc (blocks, 4) where add_parts or the other part reads it."""
        four, at = local.array(4, uint32), sums_at(own, blocks, sizes)
        for column in range(blocks):
            for x in range(4):
                four[x] = acc[4 * column + x].view(np.uint32)
            memory.store_v4(memory.address(sums, at + column * 512), four, 0)

    @inlined
    def add_sums(own, acc, blocks, sums, sizes):
        """acc (blocks, 4) += what the other part has left."""
        four, at = local.array(4, uint32), sums_at(own, blocks, sizes)
        for first in range(0, blocks, 8):
            if word(own, MEMBERS) > 0:  # always: otherwise ptxas would load all at once, and spill
                for column in range(first, min(first + 8, blocks)):
                    memory.load_v4(four, 0, memory.address(sums, at + column * 512))
                    for x in range(4):
                        acc[4 * column + x] += four[x].view(np.float32)

    @inlined
    def turn_of(own, arrays, sizes):
        """The address of the key tile's counter."""
        of_dq = int64(sizes.batch * sizes.heads) * tiles_of(sizes.seqlen_q, config.tile_m) * (2 * config.dq_partials)
        return memory.address(arrays.turns, TURNS_AT + of_dq + tile_of(own, sizes))

    @inlined
    def write_gradients(own, place, acc_dk, acc_dv, arrays, strides, sizes, score):
        """Writes dK and dV to global memory, staged in the place of the warpgroup's own rows of K and V. If other
        blocks have other heads of the group, writes their sums instead. Of two parts in line the second, whose ticket
        is higher, adds the first one's sums and writes the gradients. place: the base, moved to the dS whose place they
        take.

        All threads that read these rows must have done so.
        """
        complete = members == 0
        if packed and members:
            complete = members_of(members, word(own, KEYS)) == 0
        if in_line:
            complete = word(own, PART) & int32(1) != 0
            if complete:
                turn = turn_of(own, arrays, sizes)
                while memory.load_acquire(turn) < uint32(4 * config.consumers):  # its warps
                    pass
                add_sums(own, acc_dk, dk_blocks, arrays.dk_sums, sizes)
                add_sums(own, acc_dv, dv_blocks, arrays.dv_sums, sizes)
        if not complete:
            if config.of_dk:
                leave_sums(own, acc_dk, dk_blocks, arrays.dk_sums, sizes)
            if config.of_dv:
                leave_sums(own, acc_dv, dv_blocks, arrays.dv_sums, sizes)
            if in_line:
                turn = turn_of(own, arrays, sizes)
                warp_sync()  # all lanes have left theirs
                if special.thread_index() & int32(31) == 0:
                    memory.add_release(turn, uint32(1))
        else:
            sequence = sequence_of(own, arrays, strides, sizes)
            place_of_tile = sequence, word(own, H_KV), word(own, FIRST_ROW)
            write_outputs(place, acc_dk, acc_dv, *rows_of_lane(), *place_of_tile, arrays, strides, sizes, score)

    return write_gradients


def of_queries(config):
    """-> write(base, acc_dq, arrays, strides, sizes, score), a device function of a consumer warpgroup of a block that
    owns queries."""
    tile_m, head_dim, own_at = config.tile_m, config.head_dim, config.shared_layout().own_a
    word, queries_of = block.state_of(config).read, block.sequence_of_work(config, queries=True)
    stage, store = gradient_rows.make(config.dtype, tile_m, 16, head_dim, head_dim % 8 == 0)
    recompute = recompute_queries.make(config)

    @inlined
    def write(base, acc_dq, arrays, strides, sizes, score):
        """Stages dQ in the place of the warpgroup's own rows of Q, and writes it from there to global memory."""
        first_row, lane = rows_of_lane()
        own = QueryTile(word(base, B), word(base, H), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(base, arrays, strides, sizes)
        queries_left = int32(min(sequence.seqlen_q - own.first_query, tile_m))
        nonfinite = stage(acc_dq, score.scale, base + own_at, first_row, lane, queries_left)
        to, row = query_row(strides.dq, sequence, own.h, own.first_query), strides.dq[2]
        store(base + own_at, first_row, lane, arrays.dq, to, row, queries_left, head_dim, nonfinite)
        if nonfinite != 0:
            recompute(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    return write
