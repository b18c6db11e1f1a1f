"""Parts of dQ from shared memory to their sums in global memory, in the order of kernels/steps/dq_order.py.

One thread for each consumer warpgroup does it, so that no consumer waits for a turn.
"""

from numba import int32, int64, uint32

from ...ptx import fence, memory, tma
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.lse_delta import TURNS_AT
from ..steps.plain import parts_before
from . import backward_state, block
from .backward_query_walk import first_tile, following_tile
from .block import BEGIN, FIRST_ROW, KEYS, MEMBERS, STEP, STOP, B, H


def second_part(config):
    """Bytes of the second warpgroup's part: of its panel of 64 columns those up to head_dim, because these copies take
    most of the L2 cache's bandwidth. With one panel it has half of the rows, and all columns."""
    columns = min(config.head_dim_padded - 64, 64) if config.dq_panels == 2 else 64
    return config.dq_part_bytes * columns // 64


def make(config, tiles):
    """-> add_dq, a device function. tiles: BlockTiles."""
    tile_m, tile_n, plan = config.tile_m, config.tile_n, config.shared_layout()
    part_bytes, second_bytes = config.dq_part_bytes, second_part(config)
    turns_at, lines = TURNS_AT, config.dq_partials
    wait_read, wait_added = tma.wait_group_read(0), tma.wait_group(0)
    address, load_acquire, add_release = memory.address, memory.load_acquire, memory.add_release
    _, word_alone, _, position_alone, *_ = block.words(plan.state)
    ring = backward_state.pipelines(config).dq

    @inlined
    def parts_before_mine(own, i, step, sizes):
        """How many key tiles add to query tile i before the block's own."""
        first_key, first_query = int64(word_alone(own, FIRST_ROW)), int64(i) * tile_m
        last_query = min(first_query + tile_m, sizes.seqlen_q) - 1
        q_start, keys = first_key - position_alone(own), int64(word_alone(own, KEYS))
        first_pos, last_pos = first_query + q_start, last_query + q_start
        return uint32(parts_before(first_pos, last_pos, first_key, sizes.left, sizes.right, keys, tile_n, step))

    @inlined
    def line_of(tile, before, me):
        """Of a query tile that has so many parts before the block's own: -> (where the sum is to which it adds, how
        many parts of that come before)."""
        dealt = uint32(before // uint32(lines)) if lines > 1 else before
        own_line = int32(before - dealt * uint32(lines)) if lines > 1 else int32(0)
        return (tile * lines + own_line) * 2 + me, dealt

    @inlined
    def add_dq_of_tile(base, own, n, me, arrays, sizes):
        """One thread for each consumer warpgroup: its parts of dQ to global memory, each when its turn has come; the
        first one is the n-th of all. -> n"""
        m_tiles = divide(int32(sizes.seqlen_q) + int32(tile_m - 1), tile_m)
        heads_before = int64(word_alone(own, B)) * sizes.heads + word_alone(own, H)
        begin, stop = word_alone(own, BEGIN), word_alone(own, STOP)
        step, members = word_alone(own, STEP), word_alone(own, MEMBERS)
        end = int32(n + members * (stop - begin))
        member, i = int32(0), first_tile(begin, stop, step)
        part, before, seen = int64(0), uint32(0), uint32(0)
        own_bytes = part_bytes if me == 0 else second_bytes
        if n < end:
            part, before = line_of(heads_before * m_tiles + i, parts_before_mine(own, i, step, sizes), me)
            seen = load_acquire(address(arrays.turns, turns_at + part))
        while n < end:
            turn = address(arrays.turns, turns_at + part)
            while seen < before:
                seen = load_acquire(turn)
            place = ring.stage(n) * 2 + me
            ring.consumer_wait(base + 8 * me, n)
            fence.proxy_async_global()
            target, staged = address(arrays.dq_sums, part * (part_bytes // 4)), base + plan.dq + place * part_bytes
            if before == 0:
                tma.store_bytes(target, staged, own_bytes)
            else:
                tma.add_bytes(target, staged, own_bytes)
            tma.commit_group()
            n = int32(n + 1)
            i, member = following_tile(i, member, step, members)
            if n < end:  # the next turn is looked at while this copy is under way
                tile = (heads_before + member) * m_tiles + i
                part, before = line_of(tile, parts_before_mine(own, i, step, sizes), me)
                seen = load_acquire(address(arrays.turns, turns_at + part))
            wait_read()
            ring.consumer_release(base + 8 * me, int32(n - 1), True)
            wait_added()
            fence.proxy_async_global()
            add_release(turn, uint32(1))
        return n

    @inlined
    def add_dq(base, me, arrays, sizes):
        """add_dq_of_tile for one tile after the other."""
        w, n = int32(0), int32(0)
        while tiles.has_tile(base, w):
            n = add_dq_of_tile(base, tiles.state_of(base, w), n, me, arrays, sizes)
            tiles.leave(base, w)
            w = int32(w + 1)
        wait_added()

    return add_dq
