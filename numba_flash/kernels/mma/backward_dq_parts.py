"""The parts of dQ from a block of keys. They let backward_fused.py compute five products:

    dQ += dS K     with dS^T in shared memory, from which warps load it as rows of queries

Every key tile contributes a part to dQ of a query tile. The parts are added up in dQ itself, in global memory, in the
order of their key tiles, so all runs give the same bits. A counter for each query tile holds the number of parts added,
and a block waits for its turn. The first one stores instead of adding. Blocks take their work by a ticket, the key
tiles of a head in ascending order, so a block waits only for blocks that have begun before it. All blocks go over the
queries in the same order, the last first. kernels/wgmma/backward_fused.py does the same.

All warps of a block share the tile of dQ: each has a strip of 16 queries and some panels of columns. They leave their
part in shared memory and go on. The carrier, a warp that computes nothing, waits for the turn, lets a copy of each row
add it (tma.add_bytes_f64), and hands the turn on when all of it is there. One copy of an element is under way at a
time, so additions to it have one order, key tile by key tile.

Rows of a part lie pitch_dq elements apart: with 64 bytes behind each, what lanes write at a time lies in different
banks. The place for a part is that of P and dS. A part goes there when all warps have multiplied with dS. When the
copies have read it, the carrier arrives at an mbarrier. If two blocks share the columns, it arrives at the mbarrier of
the other block, whose scores come to that place first.
"""

from collections import namedtuple

from numba import float64, int32, int64, uint32

from ...ptx import bar, cluster, fence, ld_st, local, mbarrier, memory, special, tma
from ..steps import block_state
from ..steps.basics import divide, first_column_of, first_row_of, inlined, named, tiles_of
from ..steps.lse_delta import TURNS_AT
from ..steps.sequence import query_row, unpacked
from . import products_float64, shared_weights
from .backward_fp32_fp64 import View

# Named barriers behind those of `meet` in backward_fused_tile.py: of all warps that compute; of these and the carrier,
# when the part is there.
WORKERS, FULL = 5, 7
IN_FLIGHT = 264  # about as many key tiles as a GPU works on at a time


# The query tiles of each head, the last one first, one head after the other: `tiles` of them, from `begin` on.
Walk = namedtuple("Walk", "sequence h_kv first_key begin tiles")


def make(config):
    tile_m, tile_n, workers, both = config.tile_m, config.tile_n, config.workers, config.workers + 32
    columns, pitch, pitch_dq = config.dq_columns, config.pitch, config.pitch_dq
    strips, panels, dq_count, paired = tile_m // 16, columns // 16, columns // 2, config.blocks > 1
    # Queries are rows, and every warp has a strip of 16.
    of_dq = View("float64", tile_m, tile_n, 16, columns, columns, 1, config.large_f64)
    made, weights = products_float64.make(of_dq), shared_weights.make(pitch, 1)
    wait_read, wait_added = tma.wait_group_read(0), tma.wait_group(0)

    @inlined
    def work_of(ticket, sizes):
        """-> (b, h_kv, first_key). The first key tiles of several heads, enough to keep a GPU busy, come before their
        second tiles: so a tile's turn has come when it begins."""
        n_tiles = tiles_of(sizes.seqlen_k, tile_n)
        together = int32(max(divide(int32(IN_FLIGHT), n_tiles), int32(1)))
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
        m_tiles = tiles_of(sizes.seqlen_q, tile_m)
        sequence, from_query = walk.sequence, walk.sequence.q_start - sizes.left
        turns = memory.address(arrays.turns, TURNS_AT + int64(sequence.b) * sizes.heads * m_tiles)
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
    def tile_at(t, state, sizes):
        """-> (i, h) of the t-th tile of queries, and the Walk."""
        walk = walk_of(state, sizes)
        member = divide(t, walk.tiles)
        h = walk.h_kv * divide(sizes.heads, sizes.heads_kv) + member
        return int32(walk.begin + walk.tiles - 1 - (t - member * walk.tiles)), int32(h), walk

    @inlined
    def turn_of(h, i, state, sizes):
        m_tiles = tiles_of(sizes.seqlen_q, tile_m)
        _, turns = block_state.get(state)
        return turns + 4 * (int64(h) * m_tiles + i)

    @inlined
    def parts_before(i, state):
        """Number of lower key tiles that see query tile i."""
        # key_tiles' `begin`, from the tile's first query
        first_from_query, both = block_state.get(state + block_state.SIZE)
        first_key, keys = both >> 32, int64(int32(both))
        first_seen = min(max(int64(i) * tile_m + first_from_query, int64(0)), keys)
        return uint32((first_key - first_seen // tile_n * tile_n) // tile_n) * uint32(config.blocks)

    @inlined
    def leave(k_smem, ds_smem, dq_smem, score):
        """Stores the block's part of dQ of a query tile, scale * dS K, in shared memory."""
        acc = local.array(dq_count, float64)  # (columns / 8, 4)
        operand, other = local.array(8, made.register), local.array(made.kv_count, made.register)
        values = local.array(2, float64)
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        strip, column_part = warp % strips, warp // strips
        for x in range(dq_count):
            acc[x] = float64(0)
        place = weights.turned_place(lane, ds_smem) + strip * 128
        _, _, k_lane, _ = made.lanes(lane, int32(0), k_smem, k_smem, k_smem)
        k_lane += column_part * (panels * tile_n * 128)
        for n in range(tile_n // 16):  # written out, so that what comes next is read while this is multiplied
            weights.turned(operand, int32(place + n * (16 * pitch)))
            made.add_16(acc, operand, other, int32(k_lane + n * 2048))
        bar.sync(WORKERS, workers)  # and all are done with dS
        row, column = strip * 16 + int32(first_row_of(lane)), column_part * columns + int32(first_column_of(lane))
        to = int32(dq_smem + (row * pitch_dq + column) * 8)
        for n in range(columns // 8):
            for r in range(2):
                for x in range(2):
                    values[x] = acc[n * 4 + 2 * r + x] * score.scale
                ld_st.store_v2_f64(to + (8 * r * pitch_dq + 8 * n) * 8, values, 0)
        fence.proxy_async()
        bar.arrive(FULL, both)

    @inlined
    def copy_part(i, h, adds, dq_smem, state, strides, sizes):
        """Each lane starts to copy its rows."""
        lane, (dq, _) = special.thread_index() & int32(31), block_state.get(state)
        first = int32(cluster.rank() * config.head_dim_padded) if paired else int32(0)
        row_bytes = int32(min(config.head_dim - first, config.head_dim_padded) * 8)
        for step in range(-(-tile_m // 32)):
            row = int32(lane + 32 * step)
            query, source = int32(i * tile_m + row), int32(dq_smem + row * (8 * pitch_dq))
            if row < tile_m and query < sizes.seqlen_q and row_bytes > 0:
                target = dq + (h * strides.dq[1] + query * strides.dq[2] + first) * 8
                if adds:
                    tma.add_bytes_f64(target, source, row_bytes)
                else:
                    tma.store_bytes(target, source, row_bytes)
        tma.commit_group()

    @inlined
    def say_free(last, free):
        """Says that all lanes' copies have read the place."""
        bar.warp_sync()
        elected = special.thread_index() & int32(31) == 0
        if paired:
            mbarrier.arrive_there_if(cluster.place_in(free, cluster.rank() ^ 1), elected and not last)
        else:
            mbarrier.arrive_if(free, elected)

    @inlined
    def carry(i, h, last, dq_smem, state, free, strides, sizes):
        """The carrier brings the part of query tile i of head h to global memory, when its turn has come, and gives the
        turn to the next key tile. free: an mbarrier; last: no part comes behind it."""
        before, turn = parts_before(i, state), turn_of(h, i, state, sizes)
        while memory.load_acquire(turn) != before:  # the parts of lower key tiles have not been added yet
            pass
        adds = parts_before(i, state) != uint32(0)
        bar.sync(FULL, both)
        fence.proxy_async_global()
        copy_part(i, h, adds, dq_smem, state, strides, sizes)
        wait_read()
        say_free(last, free)
        wait_added()
        fence.proxy_async_global()
        bar.warp_sync()
        if special.thread_index() & int32(31) == 0:
            memory.add_release(turn_of(h, i, state, sizes), uint32(1))

    return named(work_of, keep, walk_of, tile_at, leave, carry)
