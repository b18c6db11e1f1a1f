"""The parts of dQ from a block of keys, in float32 and float64. They let backward_wide_fused.py compute five products:

    dQ += dS K     with dS^T in shared memory, from which warps load it as rows of queries

Every key tile contributes a part to dQ of a query tile. The parts are added up in dQ itself, in global memory, in the
order of their key tiles, so all runs give the same bits. A counter for each query tile holds the number of parts added.
A block waits for its turn. The first one stores instead of adding, so nothing has to be set to zero. Blocks take their
work by a ticket, the key tiles of a head in ascending order. So a block waits only for blocks that have begun before
it. All blocks go over the queries in the same order, the last first, so the blocks of a head follow each other without
catching up. kernels/wgmma/backward_fused.py does the same.

All warps of a block share the tile of dQ: each has a strip of 16 queries and some panels of columns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import int32, int64, uint32, uint64

from ...ptx import local, memory, special
from ..steps import block_state, numbers
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.lse_delta import TURNS_AT
from ..steps.plain import first_row_of
from ..steps.sequence import query_row, unpacked
from . import backward_wide, shared_weights


class Walk(NamedTuple):
    """The query tiles of each head, the last one first, one head after the other."""

    sequence: Any
    h_kv: int
    first_key: int
    begin: int  # the first tile of a head
    tiles: int  # of a head


class DqParts(NamedTuple):
    """Device functions. i: a query tile of head h; state: where `keep` has stored what every tile needs."""

    work_of: Callable[..., Any]  # (ticket, sizes) -> (b, h_kv, first_key)
    keep: Callable[..., Any]
    walk_of: Callable[..., Any]
    parts_before: Callable[..., Any]
    wait_turn: Callable[..., Any]
    add: Callable[..., Any]
    hand_on: Callable[..., Any]


@inlined
def bits_of(values, words):
    """words (4,) <- 16 bytes of values."""
    words[0], words[1] = values[0].view(np.uint32), values[1].view(np.uint32)
    words[2], words[3] = values[2].view(np.uint32), values[3].view(np.uint32)


@inlined
def bits_of_f64(values, words):
    for x in range(2):
        both = values[x].view(np.uint64)
        words[2 * x], words[2 * x + 1] = uint32(both & uint64(0xFFFFFFFF)), uint32(both >> uint64(32))


@inlined
def number_of(words, x):
    return words[x].view(np.float32)


@inlined
def number_of_f64(words, x):
    return uint64(uint64(words[2 * x]) | (uint64(words[2 * x + 1]) << uint64(32))).view(np.float64)


def make(config):
    tile_m, tile_n, size, double = config.tile_m, config.tile_n, config.item_size, config.dtype == "float64"
    head_dim, columns, pitch, strips = config.head_dim, config.dq_columns, config.pitch, tile_m // 16
    chunk, panel_columns = 16 // size, 128 // size  # elements of 16 bytes, and of a panel
    panels, in_flight, turns_at = columns // panel_columns, config.IN_FLIGHT, TURNS_AT
    dq_count, old_count, both_count = columns // 2, 8 * panels, 16 * panels  # old: two chunks of each panel, of a row
    blocks = config.blocks  # number of blocks that share a key tile: each counts
    real = numbers.of(config.compute_dtype).real
    to_words, to_number = (bits_of_f64, number_of_f64) if double else (bits_of, number_of)
    made = backward_wide.dq_product(config)
    weights = shared_weights.make(pitch, 1, double)

    @inlined
    def work_of(ticket, sizes):
        """The first key tiles of several heads, enough to keep a GPU busy, come before their second tiles: so a tile's
        turn has come when it begins."""
        n_tiles = divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n)
        together = int32(max(divide(int32(in_flight), n_tiles), int32(1)))
        first_head = int32(divide(ticket, int32(together * n_tiles)) * together)
        together = int32(min(together, int32(sizes.batch * sizes.heads_kv) - first_head))
        within = int32(ticket - first_head * n_tiles)
        j = divide(within, together)
        head_of_all = int32(first_head + within - j * together)
        b = divide(head_of_all, sizes.heads_kv)
        return b, int32(head_of_all - b * sizes.heads_kv), int32(j * tile_n)

    @inlined
    def keep(walk, state, arrays, strides, sizes):
        """One thread stores at `state` what every tile needs: in registers it would be kept through the loop."""
        m_tiles = divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m)
        sequence, from_query = walk.sequence, walk.sequence.q_start - sizes.left
        turns = memory.address(arrays.turns, turns_at + int64(sequence.b) * sizes.heads * m_tiles)
        block_state.put(state, memory.address(arrays.dq, query_row(strides.dq, sequence, 0, 0)), turns)
        block_state.put(state + block_state.SIZE, from_query, int64(walk.first_key) << 32 | sequence.keys)
        place, begin_and_tiles = int64(sequence.b) << 32 | walk.h_kv, int64(walk.begin) << 32 | walk.tiles
        block_state.put(state + 2 * block_state.SIZE, place, begin_and_tiles)

    @inlined
    def walk_of(state, sizes):
        """-> the Walk that `keep` stored."""
        first_from_query, first_and_keys = block_state.get(state + block_state.SIZE)
        place, begin_and_tiles = block_state.get(state + 2 * block_state.SIZE)
        b, first_key, begin = int32(place >> 32), int32(first_and_keys >> 32), int32(begin_and_tiles >> 32)
        keys, tiles = int32(first_and_keys), int32(begin_and_tiles)
        sequence = unpacked(b, sizes.seqlen_q, int64(keys), first_from_query + sizes.left)
        return Walk(sequence, int32(place), first_key, begin, tiles)

    @inlined
    def turn_of(h, i, state, sizes):
        m_tiles = divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m)
        _, turns = block_state.get(state)
        return turns + 4 * (int64(h) * m_tiles + i)

    @inlined
    def parts_before(i, state):
        """Number of lower key tiles that see query tile i."""
        # key_tiles' `begin`, from the tile's first query
        first_from_query, both = block_state.get(state + block_state.SIZE)
        first_key, keys = both >> 32, int64(int32(both))
        first_seen = min(max(int64(i) * tile_m + first_from_query, int64(0)), keys)
        return uint32((first_key - first_seen // tile_n * tile_n) // tile_n) * uint32(blocks)

    @inlined
    def wait_turn(i, h, state, sizes):
        """One thread, before a barrier: waits until the parts of lower key tiles have been added."""
        before, turn = parts_before(i, state), turn_of(h, i, state, sizes)
        while memory.load_acquire(turn) != before:
            pass

    @inlined
    def hand_on(i, h, state, sizes):
        """One thread, after a barrier that follows `add`: gives the turn to the next key tile."""
        memory.add_release(turn_of(h, i, state, sizes), uint32(1))

    @inlined
    def load_old(old, at, row, columns_left):
        """old[at : at + old_count] <- the current values of a row of dQ, from the lane's first column on."""
        for n in range(2 * panels):
            if (n // 2 * 8 + n % 2) * chunk < columns_left:
                memory.load_v4_relaxed(old, at + 4 * n, row + 128 * (n // 2) + 16 * (n % 2))
            else:
                for x in range(4):
                    old[at + 4 * n + x] = uint32(0)

    @inlined
    def store_new(acc, first, old, at, row, columns_left, score):
        """A row of dQ <- its old values plus the accumulators from `first` on."""
        values, words = local.array(chunk, real), local.array(4, uint32)
        for n in range(2 * panels):
            for x in range(4):
                words[x] = old[at + 4 * n + x]
            for j in range(chunk):
                part = acc[((n // 2) * chunk + j) * 4 + first + n % 2]
                values[j] = part * score.scale + to_number(words, j)
            to_words(values, words)
            if (n // 2 * 8 + n % 2) * chunk < columns_left:
                memory.store_v4_relaxed(row + 128 * (n // 2) + 16 * (n % 2), words, 0)

    @inlined
    def add(i, h, k_smem, ds_smem, state, strides, sizes, score):
        """dQ += scale * dS K, for query tile i."""
        acc = local.array(dq_count, real)  # (columns / 8, 4)
        operand, other = local.array(8, made.register), local.array(made.kv_count, made.register)
        old = local.array(both_count, uint32)
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        strip, first_column = warp % strips, (warp // strips) * columns
        query = int32(i * tile_m + strip * 16 + int32(first_row_of(lane)))
        column = int32(first_column + (lane & 3) * (2 * chunk))
        dq, _ = block_state.get(state)
        to = dq + (h * strides.dq[1] + query * strides.dq[2] + column) * size
        adds = parts_before(i, state) != 0
        next_rows, columns_left = (8 * strides.dq[2]) * size, int32(head_dim - column)
        rows_left = int32(sizes.seqlen_q - query)
        for x in range(dq_count):
            acc[x] = real(0)
        place = weights.turned_place(lane, ds_smem) + strip * (16 * size)
        _, _, k_lane, _ = made.lanes(lane, int32(0), k_smem, k_smem, k_smem)
        k_lane += (warp // strips) * (panels * tile_n * 128)
        for _ in range(special.opaque(tile_n // 16)):
            weights.turned(operand, place)
            made.add_16(acc, operand, other, k_lane)
            place, k_lane = int32(place + 16 * pitch * size), int32(k_lane + 2048)
        left, left_next = columns_left if rows_left > 0 else int32(0), columns_left if rows_left > 8 else int32(0)
        load_old(old, 0, to, left if adds else int32(0))
        if panels == 1:  # both rows at once, if registers allow it
            load_old(old, old_count, to + next_rows, left_next if adds else int32(0))
        store_new(acc, 0, old, 0, to, left, score)
        if panels > 1:
            load_old(old, old_count, to + next_rows, left_next if adds else int32(0))
        store_new(acc, 2, old, old_count, to + next_rows, left_next, score)

    return DqParts(work_of, keep, walk_of, parts_before, wait_turn, add, hand_on)
