"""Parts of dQ by way of shared memory, in float64: bulk copies add them up, and a warp of its own waits for turns.

backward_dq_parts.py says what parts of dQ are and in which order they are added. There every warp reads what dQ has so
far, adds and writes, between two barriers of the block: a tile waits for its turn, for the GPU's L2 and for the release
of the turn, one after the other. Here warps leave their part in shared memory and go on. One more warp, the carrier,
waits for the turn, lets a copy of each row add it (tma.add_bytes_f64), and hands the turn on when all of it is there.
The first part of a query tile is stored. Since a turn belongs to one block, additions to an element have one order.

The part's rows lie pitch_dq elements apart: with 16 bytes behind each, what lanes write at a time lies in different
banks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float64, int32, uint32

from ...ptx import bar, cluster, fence, ld_st, special, tma
from ..steps import block_state
from ..steps.inlined import inlined
from ..steps.plain import first_row_of
from . import backward_dq_parts, backward_wide, shared_weights

FULL, EMPTY = 9, 10  # named barriers: a part is in shared memory; it has been read


class DqCarried(NamedTuple):
    """Device functions. i: a query tile of head h."""

    leave: Callable[..., Any]  # by all warps but the carrier; first: nothing has been left before
    carry: Callable[..., Any]  # by the carrier; last: nothing comes behind it


def make(config):
    tile_m, tile_n, both = config.tile_m, config.tile_n, config.workers + 32
    head_dim, columns, pitch, pitch_dq = config.head_dim, config.dq_columns, config.pitch, config.pitch_dq
    strips, panels = tile_m // 16, columns // 16
    dq_count, paired, own_columns = columns // 2, config.blocks > 1, config.head_dim_padded
    made = backward_wide.dq_product(config)
    add_16, lanes, fragment, other_count = made.add_16, made.lanes, made.register, made.kv_count
    weights = shared_weights.make(pitch, 1, True)
    turned_place, turned = weights.turned_place, weights.turned
    parts = backward_dq_parts.make(config)
    parts_before, wait_turn, hand_on = parts.parts_before, parts.wait_turn, parts.hand_on
    store_bytes, add_bytes, commit = tma.store_bytes, tma.add_bytes_f64, tma.commit_group
    wait_read, wait_added = tma.wait_group_read(0), tma.wait_group(0)
    fence_async, fence_global, store_v2 = fence.proxy_async, fence.proxy_async_global, ld_st.store_v2_f64

    @inlined
    def leave(first, k_smem, ds_smem, dq_smem, score):
        """The part of dQ of a query tile, scale * dS K, to shared memory."""
        acc = cuda.local.array(dq_count, float64)  # (columns / 8, 4)
        operand, other = cuda.local.array(8, fragment), cuda.local.array(other_count, fragment)
        values = cuda.local.array(2, float64)
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        strip, column_part = warp % strips, warp // strips
        for x in range(dq_count):
            acc[x] = float64(0)
        place = turned_place(lane, ds_smem) + strip * 128
        _, _, k_lane, _ = lanes(lane, int32(0), k_smem, k_smem, k_smem)
        k_lane += column_part * (panels * tile_n * 128)
        for _ in range(special.opaque(tile_n // 16)):
            turned(operand, place)
            add_16(acc, operand, other, k_lane)
            place, k_lane = int32(place + 16 * pitch * 8), int32(k_lane + 2048)
        if not first:
            bar.sync(EMPTY, both)
        row, column = strip * 16 + int32(first_row_of(lane)), column_part * columns + (lane & 3) * 4
        to = int32(dq_smem + (row * pitch_dq + column) * 8)
        for n in range(panels):
            for x in range(2):  # of two neighbouring columns
                for r in range(2):
                    for j in range(2):
                        values[j] = acc[(2 * n + j) * 4 + 2 * r + x] * score.scale
                    store_v2(to + (8 * r * pitch_dq + 16 * n + 2 * x) * 8, values, 0)
        fence_async()
        bar.arrive(FULL, both)

    @inlined
    def carry(i, h, last, dq_smem, state, strides, sizes):
        """The part of query tile i to global memory, when its turn has come, and the turn to the next key tile."""
        lane = special.thread_index() & int32(31)
        wait_turn(i, h, state, sizes)
        adds = parts_before(i, state) != uint32(0)
        bar.sync(FULL, both)
        fence_global()
        dq, _ = block_state.get(state)
        first = int32(cluster.rank() * own_columns) if paired else int32(0)
        row_bytes = int32(min(head_dim - first, own_columns) * 8)
        for step in range(-(-tile_m // 32)):
            row = int32(lane + 32 * step)
            query = int32(i * tile_m + row)
            if row < tile_m and query < sizes.seqlen_q and row_bytes > 0:
                target = dq + (h * strides.dq[1] + query * strides.dq[2] + first) * 8
                if adds:
                    add_bytes(target, int32(dq_smem + row * (8 * pitch_dq)), row_bytes)
                else:
                    store_bytes(target, int32(dq_smem + row * (8 * pitch_dq)), row_bytes)
        commit()
        wait_read()
        if not last:
            bar.warp_sync()
            bar.arrive(EMPTY, both)
        wait_added()
        fence_global()
        bar.warp_sync()
        if lane == 0:
            hand_on(i, h, state, sizes)

    return DqCarried(leave, carry)
