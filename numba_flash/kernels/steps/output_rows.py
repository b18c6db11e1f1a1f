"""Writes rows of O from a warp's accumulators to global memory, divided and with their lse.

In 16 bits a lane has two neighbouring columns of each block of 8. The four lanes of a quad exchange them until each has
16 contiguous bytes. In 32 and 64 bits rows_wide.py writes a row.
"""

from numba import int32, int64, uint32

from ...ptx import cvt, local, memory, shfl
from . import numbers, rows_wide
from .basics import TRUE, divide, first_column_of, first_row_of, inlined
from .repeated import repeated
from .sequence import lse_row, query_row
from .units import exponent_unit


def in_16_bits(dtype, blocks, vectorized):
    """-> write, a device function, for rows of `blocks` times 8 columns. vectorized: columns are neighbours, and rows
    begin and end at multiples of 16 bytes."""
    words_of_row = (blocks + 3) // 4 * 4  # one for each block
    pack, real = cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2, numbers.of("float32").real

    @inlined
    def pair_of(acc, r, factor, n):
        """A lane's two elements of block n of 8 columns, in 16 bits; zero past the last block."""
        at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
        return pack(acc[at] * factor, acc[at + 1] * factor) if n < blocks else uint32(0)

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
        for n in range(0, words_of_row, 4):
            for i in range(2):
                exchange(words, n + i, 2, lane & 2)
        for n in range(0, words_of_row, 4):
            for i in range(0, 4, 2):
                exchange(words, n + i, 1, lane & 1)

    @inlined
    def is_finite(acc, r):
        even, odd = real(0), real(0)
        for n in range(blocks):
            at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
            even += acc[at] * real(0)  # NaN when it is NaN or Inf
            odd += acc[at + 1] * real(0)
        nonfinite = even + odd
        nonfinite += shfl.bfly_f32(nonfinite, 1)
        nonfinite += shfl.bfly_f32(nonfinite, 2)
        return nonfinite == 0

    @inlined
    def write(acc, r, factor, lane, exists, target, row_at, column_stride, columns_left):
        """Stores the lane's row r, times factor, in the row that begins at element row_at, if that exists and all of it
        is finite. -> whether it is; the same in all lanes of a quad."""
        words, finite = local.array(words_of_row, uint32), is_finite(acc, r)
        here = exists and finite
        if vectorized:
            for n in range(words_of_row):
                words[n] = pair_of(acc, r, factor, n)
            exchange_blocks(words, lane)
            to = memory.address(target, row_at) + int64((lane & 3) * 16)
            for n in range(0, words_of_row, 4):
                if here and 8 * (n + (lane & 3)) + 8 <= columns_left:
                    memory.store_v4(to + 16 * n, words, n)
        else:
            for n in range(blocks):
                two = pair_of(acc, r, factor, n)
                for i in range(2):
                    column = int32(first_column_of(lane)) + 8 * n + i
                    if here and column < columns_left:
                        half = uint32(two >> uint32(16)) if i else two
                        memory.store_b16(memory.address(target, row_at + column * column_stride), half)
        return finite

    return write


def in_32_or_64_bits(config, blocks):
    """-> the same."""
    scale_row = rows_wide.row_scaler(config.compute_dtype, blocks)
    write_row = rows_wide.row_writer(config.dtype, blocks, config.o_vectorized, config.columns_in_order)

    @inlined
    def write(acc, r, factor, lane, exists, target, row_at, column_stride, columns_left):
        finite = scale_row(acc, r, factor, TRUE)
        if finite and exists:
            write_row(acc, r, lane, target, row_at, column_stride, columns_left)
        return finite

    return write


def make(config, warp_rows):
    """-> write_rows, a device function of a warp, for warp_rows rows of a query tile."""
    columns, group, blocks = config.group_columns, config.group_size, config.group_columns // 8
    if config.item_size == 2:
        write = in_16_bits(config.dtype, blocks, config.o_vectorized)
    else:
        write = in_32_or_64_bits(config, blocks)
    to_natural = numbers.of(config.compute_dtype).real(1 / exponent_unit(config))

    @inlined
    def write_row(r, nonfinite, acc_o, inverse_l, lse, first_row, lane, work, arrays, strides, sizes):
        in_warp, sequence = int32(first_row_of(lane)) + r * 8, work.sequence
        row = int32(first_row + in_warp)
        query = divide(row, group)
        head, index = work.h + row - query * group, work.first_query + query
        exists = index < sequence.seqlen_q
        if config.write_lse and exists and work.part == 0 and lane & 3 == 0:
            arrays.lse[lse_row(sequence, head, index, sizes)] = lse[r] * to_natural
        row_at = query_row(strides.o, sequence, head, index) + work.part * columns * strides.o[3]
        columns_left = int32(min(config.head_dim_v - work.part * columns, columns))
        if not write(acc_o, r, inverse_l[r], lane, exists, arrays.o, row_at, strides.o[3], columns_left):
            nonfinite[0] |= uint32(1) << uint32(in_warp)

    write_every_row = repeated(write_row, warp_rows // 8)

    @inlined
    def write_rows(acc_o, inverse_l, lse, first_row, lane, work, arrays, strides, sizes):
        """Writes a warp's rows of a QueryWork from first_row on: inverse_l times acc_o, and lse.

        -> a bit for each row that is not finite and so is not written; the same in all lanes.
        """
        nonfinite = local.array(1, uint32)
        nonfinite[0] = uint32(0)
        write_every_row(nonfinite, acc_o, inverse_l, lse, first_row, lane, work, arrays, strides, sizes)
        bits = nonfinite[0]
        for distance in (4, 8, 16):
            bits |= shfl.bfly_b32(bits, distance)
        return bits

    return write_rows
