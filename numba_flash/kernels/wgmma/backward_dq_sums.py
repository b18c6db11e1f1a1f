"""Sums up dQ from the parts that the key tiles of wgmma/backward_fused contribute.

If several blocks share the keys of a head (to_sums), one thread for each consumer warpgroup adds the parts from shared
memory to sums in global memory, in the order of kernels/steps/dq_order.py. So no consumer waits for a turn.

If one block has all keys of a head (of_all_keys), the parts stay in shared memory. Their sum is scaled and rounded to
16 bits. With one key tile a part is all of dQ. Rows that are not finite are found in what was written. They are
computed again at the end of the block, when registers are free.
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import bar, fence, ld_st, local, memory, special, tma, vote
from ..recompute import queries as recompute
from ..steps import elements, row_writers, tile_numbers
from ..steps.basics import divide, inlined, parts_before
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import QueryTile, query_row
from . import backward_dq_alone, block, pipeline
from .backward_work import first_tile, following_tile
from .block import BEGIN, FIRST_QUERY, FIRST_ROW, KEYS, MEMBERS, QUERIES, STEP, STOP, B, H

# The low half of a turn counter is the number of turns that have passed. With a mask, its high half counts the parts.
TURN = 1 << 16


def second_part(config):
    """Bytes of the second warpgroup's part: of its panel of 64 columns those up to head_dim, because these copies take
    most of the L2 cache's bandwidth. With one panel it has half of the rows, and all columns."""
    columns = min(config.head_dim_padded - 64, 64) if config.dq_panels == 2 else 64
    return config.dq_part_bytes * columns // 64


def to_sums(config, tiles):
    """-> add_dq, a device function. tiles: of backward_block_tiles."""
    tile_m, tile_n, plan = config.tile_m, config.tile_n, config.shared_layout()
    part_bytes, second_bytes = config.dq_part_bytes, second_part(config)
    turns_at, lines = TURNS_AT, config.dq_partials
    wait_read, wait_added = tma.wait_group_read(0), tma.wait_group(0)
    state = block.state_of(config)
    word_alone = state.read_alone
    ring, packed, has_mask = pipeline.of_backward(config).dq, config.packed, config.has("mask")
    alone = backward_dq_alone.present(config)
    numbers = tile_numbers.make(config, tile_m, False) if packed else None

    @inlined
    def tiles_before(own, sizes):
        """-> (query tiles of a head, how many there are before the first of the block's head)."""
        if packed:
            m_tiles = int64(numbers.count(sizes))
            first = numbers.first(word_alone(own, B), word_alone(own, FIRST_QUERY))
            return m_tiles, word_alone(own, H) * m_tiles + first
        m_tiles = divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m)
        return m_tiles, (int64(word_alone(own, B)) * sizes.heads + word_alone(own, H)) * m_tiles

    @inlined
    def parts_before_mine(own, i, step, sizes):
        """How many key tiles add to query tile i before the block's own."""
        first_key, first_query = int64(word_alone(own, FIRST_ROW)), int64(i) * tile_m
        queries = int64(word_alone(own, QUERIES)) if packed else sizes.seqlen_q
        last_query = min(first_query + tile_m, queries) - 1
        q_start, keys = first_key - state.position_alone(own), int64(word_alone(own, KEYS))
        first_pos, last_pos = first_query + q_start, last_query + q_start
        return uint32(parts_before(first_pos, last_pos, first_key, sizes.left, sizes.right, keys, tile_n, step))

    @inlined
    def line_of(tile, before, me):
        """-> (which sum the block adds its part of the query tile to, how many of that sum's parts come before).
        before: how many of the query tile's parts come before the block's."""
        dealt = uint32(before // uint32(lines)) if lines > 1 else before
        own_line = int32(before - dealt * uint32(lines)) if lines > 1 else int32(0)
        return (tile * lines + own_line) * 2 + me, dealt

    @inlined
    def add_dq_of_tile(base, own, n, me, arrays, sizes):
        """One thread for each consumer warpgroup adds its parts of dQ to the sums, each when its turn has come. The
        first one is the n-th of all. If a mask hides a query tile, its turn passes without a part. -> n"""
        m_tiles, before_head = tiles_before(own, sizes)
        begin, stop = word_alone(own, BEGIN), word_alone(own, STOP)
        step, members = word_alone(own, STEP), word_alone(own, MEMBERS)
        line_begin, line_stop = begin, stop
        if has_mask:
            line_begin, line_stop = word_alone(own, block.LINE_BEGIN), word_alone(own, block.LINE_STOP)
        turns_left = int32(members * (line_stop - line_begin))
        member, i = int32(0), first_tile(line_begin, line_stop, step)
        part, before, seen = int64(0), uint32(0), uint32(0)
        own_bytes = part_bytes if me == 0 else second_bytes
        if turns_left > 0:
            part, before = line_of(before_head + i, parts_before_mine(own, i, step, sizes), me)
            seen = memory.load_acquire(memory.address(arrays.turns, turns_at + part))
        while turns_left > 0:
            turn, added = memory.address(arrays.turns, turns_at + part), begin <= i < stop if has_mask else True
            while (seen & uint32(TURN - 1) if has_mask else seen) < before:
                seen = memory.load_acquire(turn)
            if added:
                place = ring.stage(n) * 2 + me
                ring.consumer_wait(base + 8 * me, n)
                fence.proxy_async_global()
                target = memory.address(arrays.dq_sums, part * (part_bytes // 4))
                staged = base + plan.dq + place * part_bytes
                if (seen < uint32(TURN)) if has_mask else (before == 0):
                    tma.store_bytes(target, staged, own_bytes)
                else:
                    tma.add_bytes(target, staged, own_bytes)
                tma.commit_group()
                n = int32(n + 1)
            turns_left = int32(turns_left - 1)
            i, member = following_tile(i, member, step, members)
            if turns_left > 0:  # the next turn is looked at while this copy is under way
                tile = before_head + member * m_tiles + i
                part, before = line_of(tile, parts_before_mine(own, i, step, sizes), me)
                seen = memory.load_acquire(memory.address(arrays.turns, turns_at + part))
            if added:
                wait_read()
                ring.consumer_release(base + 8 * me, int32(n - 1), True)
                wait_added()
                fence.proxy_async_global()
            memory.add_release(turn, uint32(TURN + 1) if has_mask and added else uint32(1))
        return n

    write_alone = backward_dq_alone.make(config, tiles_before) if alone else None

    @inlined
    def add_dq(base, me, arrays, strides, sizes, score):
        """One thread calls add_dq_of_tile for one tile after the other."""
        w, n = int32(0), int32(0)
        while tiles.has_tile(base, w):
            n = add_dq_of_tile(base, tiles.state_of(base, w), n, me, arrays, sizes)
            tiles.leave(base, w)
            w = int32(w + 1)
        wait_added()

    @inlined
    def add_or_write_dq(base, me, arrays, strides, sizes, score):
        """A warp does the same, or calls write_alone."""
        w, n, first_lane = int32(0), int32(0), block.elected()
        while tiles.has_tile(base, w):
            own = tiles.state_of(base, w)
            count = int32(word_alone(own, MEMBERS) * (word_alone(own, STOP) - word_alone(own, BEGIN)))
            if word_alone(own, KEYS) <= tile_n:
                write_alone(base, own, n, me, arrays, strides, sizes, score)
            elif first_lane:
                add_dq_of_tile(base, own, n, me, arrays, sizes)
            bar.warp_sync()
            if first_lane:
                tiles.leave(base, w)
            n, w = int32(n + count), int32(w + 1)
        if first_lane:
            wait_added()

    return add_or_write_dq if alone else add_dq


def nonfinite_finder(config):
    """-> find(sequence, h, first_query, count, lane, arrays, strides), a device function of a warp: a bit for each of
    `count` rows of dQ, as it was written, that has NaN or Inf."""
    load, parts = elements.loader(config.dtype, float32), -(-config.head_dim // 32)

    @inlined
    def find(sequence, h, first_query, count, lane, arrays, strides):
        nonfinite = uint32(0)
        for row in range(count):
            found = uint32(0)
            if first_query + row < sequence.seqlen_q:
                at = query_row(strides.dq, sequence, h, first_query + row)
                for c in range(parts):
                    x = int32(lane + 32 * c)
                    if x < config.head_dim and load(arrays.dq, at + x) * float32(0) != 0:
                        found = uint32(1)
            if vote.any_lane(found) != 0:
                nonfinite |= uint32(1) << uint32(row)
        return nonfinite

    return find


def of_all_keys(config):
    """-> (leave, repair), device functions."""
    of_warp = config.tile_m // (4 * config.consumers)
    dq_at, part_bytes = config.shared_layout().dq, config.dq_part_bytes
    own_columns, own_queries = (64, 0) if config.dq_panels == 2 else (0, 64)  # how far apart the warpgroups' parts are
    store = row_writers.of_gradient(config.dtype, 16, 8, config.head_dim % 8 == 0, every_row=True)
    key_tiles, chunk_bytes, warp_bytes = config.key_tiles, 32 * 16, part_bytes // 4
    recompute_queries, find_nonfinite = recompute.make(config, of_keys=True), nonfinite_finder(config)
    state, queries_of = block.state_of(config), block.sequence_of_work(config, queries=True)
    packed, nonfinite_word = config.packed, block.nonfinite_word(config)

    @inlined
    def tile_of(own, n):
        """-> (head, first query) of the n-th tile. Each query tile comes for all members before the next."""
        members = state.read(own, MEMBERS)
        i = divide(n, members)
        h = int32(state.read(own, H) + n - i * members)
        if packed and state.read(own, STEP) < 0:
            i = int32(state.read(own, STOP) - 1 - i)
        return h, int32(i * config.tile_m)

    @inlined
    def write(own, acc_dq, me, n, arrays, strides, sizes, score):
        """Writes acc_dq (8, 4): 64 columns of 64 queries of the n-th tile."""
        thread = special.thread_index() & int32(127)
        first_row, lane = (thread >> int32(5)) * 16, thread & int32(31)
        h, first_query = tile_of(own, n)
        first_query, first_column = int64(first_query + me * own_queries), me * own_columns
        sequence = queries_of(own, arrays, strides, sizes)
        left = int32(min(sequence.seqlen_q - first_query, 64) - first_row)
        to, row = query_row(strides.dq, sequence, h, first_query + first_row) + first_column, strides.dq[2]
        columns_left = int32(config.head_dim - first_column)
        nonfinite = store(acc_dq, score.scale, lane, arrays.dq, to, row, left, left, columns_left)
        if nonfinite != 0 and lane == 0:
            state.write(own, nonfinite_word, 1)

    @inlined
    def leave(base, own, acc_dq, me, n, before, arrays, strides, sizes, score):
        """A consumer warpgroup adds acc_dq (8, 4), a key tile's part of 64 columns of 64 queries of the n-th tile of
        all, `before` of which are of other key tiles. The last key tile comes first, as it does if blocks share a head.
        own: the base, for words of the key tile."""
        n = int32(n - before)
        if key_tiles == 1:
            write(own, acc_dq, me, n, arrays, strides, sizes, score)
            return
        four = local.array(4, uint32)
        thread = special.thread_index() & int32(127)
        # Each warp has a quarter of the place, in which the numbers of a thread lie side by side.
        warp, place = thread >> int32(5), base + dq_at + (2 * n + me) * part_bytes
        mine, first_key = place + warp * warp_bytes + (thread & int32(31)) * 16, state.read(own, FIRST_ROW)
        if first_key < (key_tiles - 1) * config.tile_n:
            for chunk in range(8):
                ld_st.load_v4(four, 0, mine + chunk * chunk_bytes)
                for x in range(4):
                    acc_dq[4 * chunk + x] += four[x].view(np.float32)
        if first_key > 0:
            for chunk in range(8):
                for x in range(4):
                    four[x] = acc_dq[4 * chunk + x].view(np.uint32)
                ld_st.store_v4(mine + chunk * chunk_bytes, four, 0)
        else:
            write(own, acc_dq, me, n, arrays, strides, sizes, score)

    @inlined
    def repair(own, steps, arrays, strides, sizes, score):
        """Called by all consumers, after they have written all of dQ and passed a barrier."""
        if state.read(own, nonfinite_word) != 0:
            thread = special.thread_index() - 128
            first_row, lane = (thread >> int32(5)) * of_warp, thread & int32(31)
            sequence = queries_of(own, arrays, strides, sizes)
            for n in range(steps):
                h, first_query = tile_of(own, n)
                nonfinite = find_nonfinite(sequence, h, first_query + first_row, of_warp, lane, arrays, strides)
                tile = QueryTile(sequence.b, h, int64(first_query), int32(0))
                recompute_queries(nonfinite, first_row, lane, tile, arrays, strides, sizes, score)

    return leave, repair
