"""Writes O and lse of a query tile, beside the first S of the next one (forward.py). Rows that are not finite are
computed again."""

from numba import float32, int64, uint32

from ...ptx import bar, cvt, ld_st, memory, shfl, vote
from ..recompute import rows as recompute
from ..steps.basics import divide, first_column_of, first_row_of, inlined, named
from ..steps.sequence import lse_row, query_row
from ..steps.units import exponent_unit
from .block import query_work, rows_of_lane, tile_of
from .tile_scores import counting


def make(config, finish):
    """-> write, a device function, and `words`, the number of uint32 that it needs as work space. finish: of
    fragment_softmax.

    acc_o (head_dim_v_padded / 8, 4) is not divided yet; inverse (2,): the factors of its rows.
    """
    o_blocks = config.head_dim_v_padded // 8
    o_words = (o_blocks + 3) // 4 * 4  # a lane's words of a row in 16 bits: one for each block of 8 columns
    plan, kept_weights = config.shared_layout(), counting(config)
    recompute_rows, work_of = recompute.make(config, 16), query_work(config)
    to_natural = float32(1 / exponent_unit(config))
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def output_pair(acc_o, inverse, n, r):
        """A lane's two elements of block n of 8 columns, in 16 bits; zero past the last block."""
        x = 4 * n + 2 * r
        return pack(acc_o[x] * inverse[r], acc_o[x + 1] * inverse[r]) if n < o_blocks else uint32(0)

    @inlined
    def exchange(words, x, distance, keeps_second):
        """A lane keeps one of words x and x + distance. It gives the other to the lane `distance` away."""
        mine, given = words[x], words[x + distance]
        if keeps_second:
            mine, given = given, mine
        given = shfl.bfly_b32(given, distance)
        words[x] = given if keeps_second else mine
        words[x + distance] = mine if keeps_second else given

    @inlined
    def exchange_blocks(words, lane):
        """For n = 0, 4, ... lane i of a quad gives its words of block n + j to lane j and gets the others' words of
        block n + i. Then it has 16 contiguous bytes."""
        for n in range(0, o_words, 4):
            for i in range(2):
                exchange(words, n + i, 2, lane & 2)
        for n in range(0, o_words, 4):
            for i in range(0, 4, 2):
                exchange(words, n + i, 1, lane & 1)

    @inlined
    def write_rows(lane_row, lane_column, lane, row_states, acc_o, inverse, words, work, arrays, strides):
        """Writes a warp's 16 rows of O from its registers to global memory, except those that are not finite."""
        for r in range(2):
            row = lane_row + 8 * r
            query = divide(row, config.group_size)
            index = work.first_query + query
            at = query_row(strides.o, work.sequence, work.h + row - query * config.group_size, index)
            here = index < work.sequence.seqlen_q and ld_st.load_b32(row_states + row * config.ROW_STATE_BYTES) == 0
            if config.o_vectorized:
                for n in range(o_words):
                    words[n] = output_pair(acc_o, inverse, n, r)
                exchange_blocks(words, lane)
                to = memory.address(arrays.o, at) + int64((lane & 3) * 16)
                for n in range(0, o_words, 4):
                    if here and 8 * (n + (lane & 3)) + 8 <= config.head_dim_v:
                        memory.store_v4(to + 16 * n, words, n)
            else:
                for n in range(o_blocks):
                    two = output_pair(acc_o, inverse, n, r)
                    for i in range(2):
                        column = lane_column + 8 * n + i
                        if here and column < config.head_dim_v:
                            half = uint32(two >> uint32(16)) if i else two
                            memory.store_b16(memory.address(arrays.o, at + column * strides.o[3]), half)

    @inlined
    def write(base, work_tile, registers, words, arrays, strides, sizes, score):
        """A warp writes its rows. registers: ConsumerRegisters."""
        tile, acc_o = tile_of(work_tile), registers.acc_o
        work = work_of(tile, work_tile, arrays, strides, sizes)
        sequence = work.sequence
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
        bar.warp_sync()  # the states of a warp's rows are there for all of its lanes
        flags = base + plan.row_states
        write_rows(lane_row, lane_column, lane, flags, acc_o, inverse_l, words, work, arrays, strides)
        if vote.any_lane(some_nonfinite) != 0:
            recompute_rows(first_row, lane, base + plan.row_states, tile, arrays, strides, sizes, score)

    return named(write, words=o_words)
