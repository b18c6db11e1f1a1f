"""Parts of dQ by way of shared memory, in float64: bulk copies add them up, and a warp of its own waits for turns.

backward_dq_parts.py says what parts of dQ are and in which order they are added. There every warp reads what dQ has so
far, adds and writes, between two barriers of the block: a tile waits for its turn, for the GPU's L2 and for the release
of the turn, one after the other. Here the warps leave their part in shared memory and go on. The carrier, a warp
that computes nothing, waits for the turn, lets a copy of each row add it (tma.add_bytes_f64), and hands the turn on
when all of it is there. The first part of a query tile is stored. One copy of an element is under way at a time, so
additions to it have one order, key tile by key tile.

Rows of a part lie pitch_dq elements apart: with 64 bytes behind each, what lanes write at a time lies in different
banks. The place for a part is that of P and dS. A part goes there when all warps have multiplied with dS. When the
copies have read it, the carrier arrives at an mbarrier. If two blocks share the columns, it arrives at the mbarrier of
the other block, whose scores come to that place first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import float64, int32, uint32

from ...ptx import bar, cluster, fence, ld_st, local, mbarrier, special, tma
from ..steps import block_state
from ..steps.inlined import inlined
from ..steps.plain import first_column_of, first_row_of
from . import backward_dq_parts, backward_wide, shared_weights

# Named barriers behind those of FusedTile.meet: of all warps that compute; of these and the carrier, when the part is
# there.
WORKERS, FULL = 5, 7


class DqCarried(NamedTuple):
    """Device functions. i: a query tile of head h; free: an mbarrier."""

    leave: Callable[..., Any]  # by the warps that compute
    carry: Callable[..., Any]  # by the carrier; last: nothing comes behind it


def make(config):
    tile_m, tile_n, workers, both = config.tile_m, config.tile_n, config.workers, config.workers + 32
    head_dim, columns, pitch, pitch_dq = config.head_dim, config.dq_columns, config.pitch, config.pitch_dq
    strips, panels = tile_m // 16, columns // 16
    dq_count, paired, own_columns = columns // 2, config.blocks > 1, config.head_dim_padded
    made = backward_wide.dq_product(config)
    weights = shared_weights.make(pitch, 1, True)
    parts = backward_dq_parts.make(config)
    wait_read, wait_added = tma.wait_group_read(0), tma.wait_group(0)

    @inlined
    def leave(k_smem, ds_smem, dq_smem, score):
        """The block's part of dQ of a query tile, scale * dS K, to shared memory."""
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
            weights.turned(operand, int32(place + n * (16 * pitch * 8)))
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
        """Starts a copy of each row, by a lane."""
        lane, (dq, _) = special.thread_index() & int32(31), block_state.get(state)
        first = int32(cluster.rank() * own_columns) if paired else int32(0)
        row_bytes = int32(min(head_dim - first, own_columns) * 8)
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
        """All lanes' copies have read the place."""
        bar.warp_sync()
        elected = special.thread_index() & int32(31) == 0
        if paired:
            mbarrier.arrive_there_if(cluster.place_in(free, cluster.rank() ^ 1), elected and not last)
        else:
            mbarrier.arrive_if(free, elected)

    @inlined
    def carry(i, h, last, dq_smem, state, free, strides, sizes):
        """The part of query tile i to global memory, when its turn has come, and the turn to the next key tile."""
        parts.wait_turn(i, h, state, sizes)
        adds = parts.parts_before(i, state) != uint32(0)
        bar.sync(FULL, both)
        fence.proxy_async_global()
        copy_part(i, h, adds, dq_smem, state, strides, sizes)
        wait_read()
        say_free(last, free)
        wait_added()
        fence.proxy_async_global()
        bar.warp_sync()
        if special.thread_index() & int32(31) == 0:
            parts.hand_on(i, h, state, sizes)

    return DqCarried(leave, carry)
