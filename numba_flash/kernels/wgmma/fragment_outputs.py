"""Writes O from a warp's accumulators, 16 rows: in 16 bits to shared memory, or straight to global memory."""

from numba import int64, uint32

from ...ptx import cvt, ld_st, memory, shfl, stmatrix
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import panel_offset
from ..steps.sequence import queries_of, query_row


def make(config):
    """-> (count, stage_rows, write_rows): the number of uint32 that both need as work space, and device functions.

    acc_o (head_dim_v_padded / 8, 4) is not divided yet; inverse (2,): the factors of its rows.
    """
    rows = 16 if config.o_buffer else config.tile_m  # rows of the tile in which a warp stages O
    panel, staged_blocks = rows * 128, config.o_columns // 8  # bytes of 64 columns; blocks of 8
    o_blocks = config.head_dim_v_padded // 8
    o_words = (o_blocks + 3) // 4 * 4  # a lane's words of a row in 16 bits: one for each block of 8 columns
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    address, store_v4, store_b16 = memory.address, memory.store_v4, memory.store_b16

    @inlined
    def output_pair(acc_o, inverse, n, r):
        """A lane's two elements of block n of 8 columns, in 16 bits; zero past the last block."""
        x = 4 * n + 2 * r
        return pack(acc_o[x] * inverse[r], acc_o[x + 1] * inverse[r]) if n < o_blocks else uint32(0)

    @inlined
    def exchange_blocks(words, lane):
        """For n = 0, 4, ... lane i of a quad gives its words of block n + j to lane j and gets the others' words of
        block n + i. Then it has 16 contiguous bytes."""
        right, odd = lane & 2, lane & 1
        for n in range(0, o_words, 4):
            for i in range(2):  # with the lane two further: it takes the blocks n + 2 and n + 3, or n and n + 1
                mine, given = words[n + i], words[n + i + 2]
                if right:
                    mine, given = given, mine
                given = shfl.bfly_b32(given, 2)
                words[n + i] = given if right else mine
                words[n + i + 2] = mine if right else given
        for n in range(0, o_words, 4):
            for i in range(0, 4, 2):  # with the next lane: one of the two blocks
                mine, given = words[n + i], words[n + i + 1]
                if odd:
                    mine, given = given, mine
                given = shfl.bfly_b32(given, 1)
                words[n + i] = given if odd else mine
                words[n + i + 1] = mine if odd else given

    @inlined
    def stage_rows(o_smem, first_row, lane, acc_o, inverse, words, part):
        """Stages a warp's 16 rows of O in shared memory, in 16 bits: the part-th o_columns of them."""
        # Lanes give the rows of four matrices: 8 rows, the 8 rows below, and both again 8 columns further.
        at = o_smem + panel_offset((0 if config.o_buffer else first_row) + (lane & 15), lane >> 4, rows)
        for n in range(0, staged_blocks, 2):
            for i in range(4):
                words[i] = output_pair(acc_o, inverse, part * staged_blocks + n + i // 2, i % 2)
            pair = n // 2
            stmatrix.x4((at ^ ((pair & 3) << 5)) + (pair >> 2) * panel, words, 0)  # (16, 16)

    @inlined
    def write_rows(lane_row, lane_column, lane, row_states, acc_o, inverse, words, tile, arrays, strides, sizes):
        """Writes a warp's 16 rows of O from its registers to global memory, except those that are not finite."""
        sequence = queries_of(tile.b, arrays, strides, sizes)
        for r in range(2):
            row = lane_row + 8 * r
            query = divide(row, config.group_size)
            index = tile.first_query + query
            at = query_row(strides.o, sequence, tile.h + row - query * config.group_size, index)
            here = index < sequence.seqlen_q and ld_st.load_b32(row_states + row * config.ROW_STATE_BYTES) == 0
            if config.o_vectorized:
                for n in range(o_words):
                    words[n] = output_pair(acc_o, inverse, n, r)
                exchange_blocks(words, lane)
                to = address(arrays.o, at) + int64((lane & 3) * 16)
                for n in range(0, o_words, 4):
                    if here and 8 * (n + (lane & 3)) + 8 <= config.head_dim_v:
                        store_v4(to + 16 * n, words, n)
            else:
                for n in range(o_blocks):
                    two = output_pair(acc_o, inverse, n, r)
                    column = lane_column + 8 * n
                    if here and column < config.head_dim_v:
                        store_b16(address(arrays.o, at + column * strides.o[3]), two)
                    if here and column + 1 < config.head_dim_v:
                        store_b16(address(arrays.o, at + (column + 1) * strides.o[3]), uint32(two >> uint32(16)))

    return 4 if config.o_place else o_words, stage_rows, write_rows
