"""Writes O and lse of a query tile, beside the first S of the next one (forward.py). O goes by way of shared memory, or
straight to global memory. Rows that are not finite are computed again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from ...ptx import bar, fence, ld_st, shfl, vote
from ..recompute import rows as recompute
from ..steps import output_rows
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of
from ..steps.query_tile import QueryTile
from ..steps.sequence import lse_row, queries_of
from ..steps.units import exponent_unit
from . import fragment_outputs
from .block import rows_of_lane
from .tile_scores import counting


class Outputs(NamedTuple):
    """place: where Q of the query tile was; tile: a QueryTile; registers: ConsumerRegisters, in which alpha has 1 / l
    of the lane's rows, and distance their lse."""

    words: int  # uint32 that `write` needs as work space
    write: Callable[..., Any]  # (base, place, tile, registers, words, arrays, strides, sizes, score), by a warp


def make(config):
    plan, o_in_q, o_staged = config.shared_layout(), config.o_place == "q", config.o_place != ""
    o_bytes = 32 * config.o_columns  # of a warp's rows that are staged at a time
    o_parts, kept_weights = -(-config.head_dim_v_padded // config.o_columns), counting(config)
    store_rows = output_rows.make(config, 16, config.o_columns, config.o_place == "own")
    o_words, stage_rows, write_rows = fragment_outputs.make(config)
    recompute_rows, to_natural = recompute.make(config, 16), float32(1 / exponent_unit(config))

    @inlined
    def write(base, place, tile, registers, words, arrays, strides, sizes, score):
        acc_o, sequence = registers.acc_o, queries_of(tile.b, arrays, strides, sizes)
        first_row, lane = rows_of_lane()
        lane_row, lane_column = first_row + first_row_of(lane), first_column_of(lane)
        inverse_l, lse = registers.alpha, registers.scores.distance
        if kept_weights.drops:
            kept_weights.scale(inverse_l, score)
        some_nonfinite = uint32(0)
        nonfinite = registers.m  # the same registers: NaN where a number of the row is NaN or Inf
        for r in range(2):
            even, odd = float32(0), float32(0)
            for n in range(config.head_dim_v_padded // 8):
                even += acc_o[4 * n + 2 * r] * float32(0)
                odd += acc_o[4 * n + 2 * r + 1] * float32(0)
            nonfinite[r] = even + odd
        for r in range(2):
            nonfinite[r] += shfl.bfly_f32(nonfinite[r], 1)
        for r in range(2):
            nonfinite[r] += shfl.bfly_f32(nonfinite[r], 2)
        for r in range(2):
            row = lane_row + 8 * r
            query = divide(row, config.group_size)
            flag = uint32(0) if nonfinite[r] == 0 else uint32(1)
            some_nonfinite |= flag
            if lane & 3 == 0:
                ld_st.store_b32(base + plan.row_states + row * config.ROW_STATE_BYTES, flag)
                ld_st.store_b32(base + plan.row_states + row * config.ROW_STATE_BYTES + 4, lse[r].view(np.uint32))
                if config.write_lse and tile.first_query + query < sequence.seqlen_q:
                    head = tile.h + row - query * config.group_size
                    arrays.lse[lse_row(sequence, head, tile.first_query + query, sizes)] = lse[r] * to_natural
        o_smem = place if o_in_q else base + plan.o + (first_row >> 4) * o_bytes
        if o_staged:
            # In Q's place a warp writes over 16 rows that only its own quarter of each product has read. So the
            # hardware does it; PTX does not say so.
            stage_rows(o_smem, first_row, lane, acc_o, inverse_l, words, 0)
            if o_in_q:
                fence.proxy_async()  # the next Q comes by TMA, and must not be overtaken by what was written here
            bar.warp_sync()  # the states of a warp's rows, and the rows, are there for all of its lanes
            store_rows(first_row, lane, o_smem, base + plan.row_states, tile, arrays, strides, sizes)
            if o_parts > 1:  # no loop, through which ptxas does not follow wgmma's registers
                bar.warp_sync()  # all lanes have read the first part
                stage_rows(o_smem, first_row, lane, acc_o, inverse_l, words, 1)
                bar.warp_sync()
                second_part = QueryTile(tile.b, tile.h, tile.first_query, int32(1))
                store_rows(first_row, lane, o_smem, base + plan.row_states, second_part, arrays, strides, sizes)
        else:
            bar.warp_sync()  # the states of a warp's rows are there for all of its lanes
            flags = base + plan.row_states
            write_rows(lane_row, lane_column, lane, flags, acc_o, inverse_l, words, tile, arrays, strides, sizes)
        if vote.any_lane(some_nonfinite) != 0:
            recompute_rows(first_row, lane, base + plan.row_states, tile, arrays, strides, sizes, score)

    return Outputs(o_words, write)
