"""K and V of a forward in float64, in slices of their columns: the room of one tile in shared memory serves both.

At head_dim 256 a tile of 64 queries takes 128 KB, and K and V beside it could have 16 keys each. A warp would read as
much of Q as of K for its scores, 2 KB for each product, which takes shared memory as long as the product takes the
tensor cores. With 32 keys it is 1.5 KB. So slice i of V comes to where slice i of K was, and the next tile's K to where
that was: each is asked for when that is done with, and is needed two slices later.

It is asked for behind the products of a slice, not between the barrier and them: there is time for it, and its
addresses take no registers beside fragments. Slice i has the i-th quarter of the columns of each of the two warps that
share rows. The barrier in front of V's first
slice is also the one behind which the two add up their scores.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32

from ...ptx import cp_async, special
from ..steps import async_tiles, block_state
from ..steps.inlined import inlined
from . import exchanged_scores

FIRST, SECOND, THIRD, FOURTH = (np.int32(i) for i in range(4))  # not Python's own: see inlined.py


class SlicedTiles(NamedTuple):
    """Device functions."""

    start: Callable[..., Any]
    scores: Callable[..., Any]
    outputs: Callable[..., Any]


def make(config, products):
    tile_n, threads, slices = config.tile_n, config.threads, config.SLICES
    slice_columns = config.head_dim_padded // slices  # half of them of each warp
    gap = (config.group_columns - slice_columns // 2) * 8  # from the columns of one warp to those of the other
    panels, slice_bytes = slice_columns // 32, slice_columns * tile_n * 8  # panels: of a slice, of one warp
    q_panel, kv_panel = config.tile_m * 128, tile_n * 128
    s_count = config.warp_rows // 16 * (tile_n // 8) * 4
    plan = config.shared_layout()
    exchanged = exchanged_scores.make(config)
    add_k_panel, add_v_slice = products.add_k_panel, products.add_v_slice
    lanes, wait_oldest = products.lanes, cp_async.wait_group(slices - 2)

    def loader(columns):
        of_panels = async_tiles.panel_loader(tile_n, slice_columns, threads, columns == config.head_dim_padded, gap)

        @inlined
        def load(i, places, source, row_bytes, j, rows_left):
            """Start the copies of slice i, and close their group."""
            to = int32(places.q + int32(plan.k) + i * slice_bytes)
            columns_left = int32(columns - i * (slice_columns // 2))
            source += i * (slice_columns // 2 * 8)
            of_panels(to, source, row_bytes, int32(j * tile_n), rows_left, columns_left, special.thread_index())
            cp_async.commit_group()

        return load

    load_of_k, load_of_v = loader(config.head_dim), loader(config.head_dim_v)

    @inlined
    def load_k(i, places, j, row_bytes, rows_left):
        """Slice i of tile j of K."""
        k_global, _ = block_state.get(
            places.q + int32(plan.tile_state)
        )  # read anew each time: it takes no registers then
        load_of_k(i, places, k_global, row_bytes, j, rows_left)

    @inlined
    def load_v(i, places, j, row_bytes, rows_left):
        """The same of V."""
        _, v_global = block_state.get(places.q + int32(plan.tile_state))
        load_of_v(i, places, v_global, row_bytes, j, rows_left)

    @inlined
    def lanes_again(places):
        """Where the lane's rows begin, worked out anew: kept through the loop, it would cost registers."""
        thread, room = special.thread_index(), places.q + int32(plan.k)
        return lanes(thread & int32(31), thread >> int32(5), places.q, room, room)

    @inlined
    def turn():
        """The next slice is there, and everyone is done with the one before."""
        wait_oldest()
        cuda.syncthreads()

    @inlined
    def start(places, j, k_bytes, rows_left):
        """All of the first tile's K but the last slice; the caller's copies of Q arrive with the first one."""
        load_k(FIRST, places, j, k_bytes, rows_left)
        load_k(SECOND, places, j, k_bytes, rows_left)
        load_k(THIRD, places, j, k_bytes, rows_left)

    @inlined
    def add_scores(i, registers, q_lane, k_lane):
        """acc_s += Q . K^T over the warp's half of slice i."""
        for n in range(panels):
            q_ahead, k_ahead = (i * panels + n) * q_panel, i * slice_bytes + n * kv_panel
            add_k_panel(registers.acc_s, registers.q_frag, registers.kv_frag, q_lane, k_lane, q_ahead, k_ahead)

    @inlined
    def add_outputs(i, registers, v_lane):
        """acc_o += P . V over slice i."""
        add_v_slice(i, registers.acc_o, registers.p_frag, registers.kv_frag, int32(v_lane + i * slice_bytes))

    @inlined
    def scores(j, registers, places, k_bytes, v_bytes, rows_left):
        """acc_s = Q . K^T, while the rest of K and the tile's V come."""
        for n in range(s_count):
            registers.acc_s[n] = 0.0
        q_lane, k_lane, _, _ = lanes_again(places)
        turn()
        add_scores(FIRST, registers, q_lane, k_lane)
        load_k(FOURTH, places, j, k_bytes, rows_left)
        turn()
        add_scores(SECOND, registers, q_lane, k_lane)
        load_v(FIRST, places, j, v_bytes, rows_left)
        turn()
        add_scores(THIRD, registers, q_lane, k_lane)
        load_v(SECOND, places, j, v_bytes, rows_left)
        turn()
        add_scores(FOURTH, registers, q_lane, k_lane)
        load_v(THIRD, places, j, v_bytes, rows_left)
        _, _, _, s_lane = lanes_again(places)
        exchanged.put_all(registers.acc_s, s_lane)
        turn()
        exchanged.get_sum(registers.acc_s, s_lane)
        load_v(FOURTH, places, j, v_bytes, rows_left)

    @inlined
    def outputs(next_j, registers, places, more, k_bytes):
        """acc_o += P . V, while the next tile's K comes, if there are more."""
        rows_left = int32(tile_n) if more else int32(0)
        _, _, v_lane, _ = lanes_again(places)
        add_outputs(FIRST, registers, v_lane)
        turn()
        add_outputs(SECOND, registers, v_lane)
        load_k(FIRST, places, next_j, k_bytes, rows_left)
        turn()
        add_outputs(THIRD, registers, v_lane)
        load_k(SECOND, places, next_j, k_bytes, rows_left)
        turn()
        add_outputs(FOURTH, registers, v_lane)
        load_k(THIRD, places, next_j, k_bytes, rows_left)

    return SlicedTiles(start, scores, outputs)
