"""A mask_mod as bits, in the layout of a mask's (mask_bits.py): which scores it leaves. This kernel runs behind
tile_states, before the attention kernel.

An attention kernel reads a word where a function would be called for 32 scores, in each of its tiles that the states
say are seen in part. All heads and batch entries for which the function gives the same share the bits. And the
attention kernel is the same for every mask_mod.

A warp writes 8 rows of 128 columns. A lane has the word of the columns that it holds in the attention kernel, of the
row lane // 4. The function is called only for positions that causal, window and lengths leave, and
only where a tile is seen in part. Rows are queries and columns keys, or with of_keys the other way around.

Launch: grid (halves of pieces * groups of 128 columns / warps of a block), block (config.threads).
"""

from numba import cuda, int32, int64, uint32

from ...abi.parameters import STATES_IN_WORD
from ...ptx import special
from ..steps import sequence
from ..steps.basics import divide, first_column_of, first_row_of, inlined, key_queries, row_keys, tiles_of
from . import at_position, tile_walk, user
from .mask_bits import ENDS, PIECE
from .reads import bits_finder

EVERY_BIT = uint32(0xFFFFFFFF)


def make(config):
    own_rows, other_rows, heads_in_tile, of_keys = config.tile.own, config.tile.other, config.tile.heads, config.tile[3]
    sequence_of, visible = sequence.make(config), user.make(config, "mask_mod")
    states_of, bits_of = tile_walk.states_of(config), bits_finder(of_keys)

    @inlined
    def seen_of(b, h, row, first_column, columns, arrays, strides):
        """-> (whether in the row's tiles of these 128 columns something is seen, whether something is not)."""
        states, by = states_of(arrays, strides)
        row = int32(b * by[0] + divide(h, heads_in_tile) * by[1] + divide(row, own_rows) * by[2])
        seen, hidden = False, False
        tile = divide(first_column, other_rows)
        while tile * other_rows < min(first_column + int32(128), columns):
            word = states[row + divide(tile, STATES_IN_WORD)] >> uint32(tile % STATES_IN_WORD)
            seen = seen or word & uint32(1) != 0
            hidden = hidden or word & uint32(1) == 0 or word & uint32(1 << STATES_IN_WORD) != 0
            tile = int32(tile + 1)
        return seen, hidden

    @inlined
    def columns_of(row, own, sizes):
        """-> [first, end) of the columns that causal, window and lengths leave a row."""
        if of_keys:
            first, end = key_queries(int64(row), own.q_start, sizes.left, sizes.right, own.seqlen_q)
            end = end if row < own.keys else first
        else:
            first, end = row_keys(row + own.q_start, sizes.left, sizes.right, own.keys)
        return int32(first), int32(end)

    @inlined
    def word_of(own, h, row, column, first, end, arrays, strides):
        """The bits of a lane's columns of 128 in one row. column: the first."""
        word = uint32(0)
        for n in range(16):
            for i in range(2):
                x = int32(column + 8 * n + i)
                if first <= x and x < end:
                    query, key = (x, row) if of_keys else (row, x)
                    if visible(at_position(own.b, h, query, key, query + own.q_start), arrays, strides):
                        word |= uint32(1) << uint32(2 * n + i)
        return word

    @cuda.jit
    def mask_mod_bits(arrays, strides, sizes):
        thread = special.thread_index()
        lane = thread & int32(31)
        bits, by = bits_of(arrays, strides)
        rows, columns = int32(sizes.seqlen_q), int32(sizes.seqlen_k)
        if of_keys:
            rows, columns = columns, rows
        groups, pieces = tiles_of(columns, 128), tiles_of(rows, PIECE)
        heads = int32(sizes.heads) if by[1] != 0 else int32(1)
        batch = int32(sizes.batch) if by[0] != 0 else int32(1)
        number = int32(special.block_index() * (config.threads // 32) + (thread >> int32(5)))
        if number < batch * heads * pieces * 2 * groups:
            half_of_all = divide(number, groups)
            head = divide(half_of_all, pieces * int32(2))
            half, group = int32(half_of_all - head * pieces * 2), int32(number - half_of_all * groups)
            b = divide(head, heads)
            h, first_column = int32(head - b * heads), int32(group * 128)
            row, word = int32(half * 8 + first_row_of(lane)), uint32(0)
            if row < rows:
                seen, hidden = seen_of(b, h, row, first_column, columns, arrays, strides)
                word = EVERY_BIT if seen else uint32(0)
                if seen and hidden:
                    own, column = sequence_of(b, arrays, strides, sizes), int32(first_column + first_column_of(lane))
                    first, end = columns_of(row, own, sizes)
                    word = word_of(own, h, row, column, first, end, arrays, strides)
            piece = b * by[0] + h * by[1] + (row >> 4) * by[2] + ENDS
            bits[piece + (row & (PIECE - 1)) * by[3] + 4 * group + (lane & int32(3))] = word

    return mask_mod_bits
