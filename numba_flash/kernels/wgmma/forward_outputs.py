"""Writes O and lse of a query tile, beside the first S of the next one (forward.py). O goes by way of shared memory, or
straight to global memory. Rows that are not finite are computed again."""

from numba import float32, int32, uint32

from ...ptx import bar, cvt, fence, ld_st, local, memory, shfl, stmatrix, vote
from ..recompute import rows as recompute
from ..steps import output_rows
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, panel_offset
from ..steps.query_tile import QueryTile
from ..steps.sequence import lse_row, query_row
from ..steps.sequence import queries as make_queries
from ..steps.units import exponent_unit
from . import pipeline
from .block import rows_of_lane, tile_of
from .tile_scores import counting


def of_fragments(config):
    """-> (stage_rows, write_rows), device functions that write a warp's 16 rows of O in 16 bits: to shared memory, or
    straight to global memory.

    acc_o (head_dim_v_padded / 8, 4) is not divided yet; inverse (2,): the factors of its rows.
    """
    rows = 16 if config.o_buffer else config.tile_m  # rows of the tile in which a warp stages O
    panel, staged_blocks = rows * 128, config.o_columns // 8  # bytes of 64 columns; blocks of 8
    o_blocks = config.head_dim_v_padded // 8
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    address, store_b16, queries_of = memory.address, memory.store_b16, make_queries(config)

    @inlined
    def output_pair(acc_o, inverse, n, r):
        """A lane's two elements of block n of 8 columns, in 16 bits; zero past the last block."""
        x = 4 * n + 2 * r
        return pack(acc_o[x] * inverse[r], acc_o[x + 1] * inverse[r]) if n < o_blocks else uint32(0)

    @inlined
    def stage_rows(o_smem, first_row, lane, acc_o, inverse, part):
        """Stages a warp's 16 rows of O in shared memory: the part-th o_columns of them."""
        words = local.array(4, uint32)
        # Lanes give the rows of four matrices: 8 rows, the 8 rows below, and both again 8 columns further.
        at = o_smem + panel_offset((0 if config.o_buffer else first_row) + (lane & 15), lane >> 4, rows)
        for n in range(0, staged_blocks, 2):
            for i in range(4):
                words[i] = output_pair(acc_o, inverse, part * staged_blocks + n + i // 2, i % 2)
            pair = n // 2
            stmatrix.x4((at ^ ((pair & 3) << 5)) + (pair >> 2) * panel, words, 0)  # (16, 16)

    @inlined
    def write_rows(lane_row, lane_column, row_states, acc_o, inverse, tile, arrays, strides, sizes):
        """Writes a warp's 16 rows of O from its registers to global memory, except those that are not finite."""
        sequence = queries_of(tile.b, arrays, strides, sizes)
        for r in range(2):
            row = lane_row + 8 * r
            query = divide(row, config.group_size)
            index = tile.first_query + query
            at = query_row(strides.o, sequence, tile.h + row - query * config.group_size, index)
            here = index < sequence.seqlen_q and ld_st.load_b32(row_states + row * config.ROW_STATE_BYTES) == 0
            for n in range(o_blocks):
                two = output_pair(acc_o, inverse, n, r)
                column = lane_column + 8 * n
                to = address(arrays.o, at + column * strides.o[3])
                if config.o_vectorized:
                    if here and column < config.head_dim_v:
                        memory.store_b32(to, two)
                else:
                    if here and column < config.head_dim_v:
                        store_b16(to, two)
                    if here and column + 1 < config.head_dim_v:
                        store_b16(to + 2 * strides.o[3], uint32(two >> uint32(16)))

    return stage_rows, write_rows


def make(config, finish):
    """-> write, a device function. finish: of fragment_softmax."""
    ring, q_bytes = pipeline.of_forward(config).q, config.tile_m * 128 * -(-config.head_dim_padded // 64)
    plan, o_in_q, o_staged = config.shared_layout(), config.o_place == "q", config.o_place != ""
    o_bytes = 32 * config.o_columns  # of a warp's rows that are staged at a time
    o_parts, kept_weights = -(-config.head_dim_v_padded // config.o_columns), counting(config)
    store_rows = output_rows.make(config, 16, config.o_columns, config.o_place == "own")
    (stage_rows, write_rows), queries_of = of_fragments(config), make_queries(config)
    recompute_rows, to_natural = recompute.make(config, 16), float32(1 / exponent_unit(config))

    @inlined
    def write(base, work_tile, seen, registers, arrays, strides, sizes, score):
        """By a warp. registers: ConsumerRegisters; seen: the number of query tiles before this one, in the place of
        whose Q O may be staged."""
        tile, acc_o = tile_of(work_tile), registers.acc_o
        sequence = queries_of(tile.b, arrays, strides, sizes)
        first_row, lane = rows_of_lane()
        lane_row, lane_column = first_row + first_row_of(lane), first_column_of(lane)
        inverse_l, lse = registers.alpha, registers.scores.distance  # the same registers, free by now
        finish(registers.m, registers.l, inverse_l, lse)
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
                if config.write_lse and tile.first_query + query < sequence.seqlen_q:
                    head = tile.h + row - query * config.group_size
                    arrays.lse[lse_row(sequence, head, tile.first_query + query, sizes)] = lse[r] * to_natural
        if o_in_q:
            o_smem = base + plan.q + ring.stage(seen) * q_bytes
        else:
            o_smem = base + plan.o + (first_row >> 4) * o_bytes
        if o_staged:
            # In Q's place a warp writes over 16 rows that only its own quarter of each product has read. So the
            # hardware does it; PTX does not say so.
            stage_rows(o_smem, first_row, lane, acc_o, inverse_l, 0)
            if o_in_q:
                fence.proxy_async()  # the next Q comes by TMA, and must not be overtaken by what was written here
            bar.warp_sync()  # the states of a warp's rows, and the rows, are there for all of its lanes
            store_rows(first_row, lane, o_smem, base + plan.row_states, tile, arrays, strides, sizes)
            if o_parts > 1:  # no loop, through which ptxas does not follow wgmma's registers
                bar.warp_sync()  # all lanes have read the first part
                stage_rows(o_smem, first_row, lane, acc_o, inverse_l, 1)
                bar.warp_sync()
                second_part = QueryTile(tile.b, tile.h, tile.first_query, int32(1))
                store_rows(first_row, lane, o_smem, base + plan.row_states, second_part, arrays, strides, sizes)
        else:
            bar.warp_sync()  # the states of a warp's rows are there for all of its lanes
            flags = base + plan.row_states
            write_rows(lane_row, lane_column, flags, acc_o, inverse_l, tile, arrays, strides, sizes)
        if vote.any_lane(some_nonfinite) != 0:
            recompute_rows(first_row, lane, base + plan.row_states, tile, arrays, strides, sizes, score)

    return write
