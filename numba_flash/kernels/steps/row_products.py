"""Which rows of dO and O the threads of a block have, and the sums of their products: what delta begins with.

`config.lanes` neighbouring lanes share `config.rows_of_lanes` neighbouring rows of a head. They load a part of every
row before they add anything up, so that a thread has many bytes on their way. Each lane has 16 bytes of a row, whatever
the size of the copies is: so the order of a sum follows from its length and the dtype alone. In the end the sum of row
n is in the lanes that are n modulo the number of rows.

Rows of a head are numbered in units of config.UNIT, so that no lanes have rows of two heads.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import int32, int64, uint32, uint64

from ...config.forward import ITEM_SIZE
from ...ptx import local, memory, shfl
from . import elements, lse_delta, sequence as sequences, tile_numbers
from .basics import divide, inlined, named, tiles_of
from .sequence import query_row


class Rows(NamedTuple):
    """The rows that some lanes share. Some or all of them may lie past the last one."""

    sequence: Any
    h: Any
    head_of_all: Any
    first: Any


def _number_of(dtype):
    """-> number_of(words, at, i), a device function: number i of 16 bytes that begin at words[at]."""
    half_of, double, single = elements.halves(dtype), dtype == "float64", dtype == "float32"

    @inlined
    def number_of(words, at, i):
        if double:
            high, low = uint64(words[at + 2 * i + 1]), uint64(words[at + 2 * i])
            return uint64(high << uint64(32) | low).view(np.float64)
        if single:
            return words[at + i].view(np.float32)
        return half_of(words[at + i // 2], i % 2)

    return number_of


def make(config):
    """-> rows_of(thread, block, arrays, strides, sizes): its Rows; sum_of_row(rows, lane, arrays, strides): the sum of
    the lane's own one."""
    lanes, count, copied, size = config.lanes, config.rows_of_lanes, config.load_bytes, ITEM_SIZE[config.dtype]
    unit, groups, in_order, columns = config.UNIT, config.threads // config.lanes, config.in_order, config.head_dim_v
    in_unit_bits, every, single = (unit // count).bit_length() - 1, 16 // size, copied == size
    words_of_rows = 4 * count
    queries_of, compute, of_terms = sequences.queries(config), config.compute_dtype, config.of_terms
    real, number_of = elements.COMPUTE_TYPES[config.dtype], _number_of(config.dtype)
    numbers = tile_numbers.make(config, unit, False) if in_order else None
    add_lane = shfl.bfly_f64 if compute == "float64" else shfl.bfly_f32
    steps = -(-columns // (every * lanes))
    apart, together = count.bit_length() - 1, lanes.bit_length() - 1

    @inlined
    def rows_of(thread, block, arrays, strides, sizes):
        part = int64(block) * groups + (thread >> together)
        number = int32(part >> in_unit_bits)
        in_unit = int32((part & (unit // count - 1)) * count)
        heads, units = int32(sizes.heads), tiles_of(sizes.seqlen_q, unit)
        if in_order:
            units = numbers.count(sizes)
        head_of_all = divide(number, units)
        place = int32(number - head_of_all * units)
        if in_order:
            b, first_query, rows = numbers.sequence(place, arrays, strides, sizes)
            first = int32((place - numbers.first(b, first_query)) * unit)
            h, there = head_of_all, head_of_all < heads and first < rows
            sequence = sequences.packed_queries(b, first_query, rows, sizes)
        else:
            b, first = divide(head_of_all, heads), int32(place * unit)
            there = b < sizes.batch
            b = b if there else int32(0)
            h, sequence = int32(head_of_all - b * heads), queries_of(b, arrays, strides, sizes)
        past = int32(lse_delta.row_blocks(sequence.seqlen_q) << int32(4))
        return Rows(sequence, h, head_of_all, int32(first + in_unit) if there else past)

    @inlined
    def load(words, array, row_at, by_row, by_column, x, left):
        """words (count, 4) <- 16 bytes of each of `left` rows, from column x on; zeros where there is nothing."""
        for n in range(count):
            for ahead in range(0, 16, copied):
                at, column = 4 * n + ahead // 4, int32(x + ahead // size)
                place = memory.address(array, row_at + n * by_row + column * by_column)
                here = uint32(n < left and column < columns)
                if copied == 16:
                    memory.load_v4_if(words, at, place, here)
                elif copied == 8:
                    memory.load_v2_if(words, at, place, here)
                elif copied == 4:
                    words[at] = memory.load_b32_if(place, here)
                elif ahead % 4 == 0:
                    words[at] = memory.load_b16_if(place, here)
                else:
                    words[at] |= memory.load_b16_if(place, here) << uint32(16)

    @inlined
    def sum_of_row(rows, lane, arrays, strides):
        sequence, left = rows.sequence, int32(rows.sequence.seqlen_q - rows.first)
        do_at = query_row(strides.do, sequence, rows.h, rows.first)
        o_at = query_row(strides.o, sequence, rows.h, rows.first)
        do_column, o_column = (strides.do[3], strides.o[3]) if single else (int64(1), int64(1))
        of_do, of_o = local.array(words_of_rows, uint32), local.array(words_of_rows, uint32)
        sums = local.array(count, real)
        for n in range(count):
            sums[n] = real(0)
        for step in range(steps):
            x = int32((lane + step * lanes) * every)
            load(of_do, arrays.do, do_at, strides.do[2], do_column, x, left)
            load(of_o, arrays.o, o_at, strides.o[2], o_column, x, left)
            if left > 0:  # a branch keeps all loads in front of it: else the assembler would wait between them
                for n in range(count):
                    for i in range(every):
                        do, o = number_of(of_do, 4 * n, i), number_of(of_o, 4 * n, i)
                        # O of a row without keys is 0 and stays 0, so its term is 0 even if dO is NaN.
                        sums[n] += real(0) if of_terms and o == real(0) else do * o
        # Lanes first give each other the rows that are not their own: half of those that are left, and half again.
        for k in range(apart):
            odd = (lane >> int32(k)) & int32(1) != 0
            for n in range(count >> (k + 1)):
                own, other = sums[2 * n + 1] if odd else sums[2 * n], sums[2 * n] if odd else sums[2 * n + 1]
                sums[n] = own + add_lane(other, 1 << k)
        total = sums[0]
        for k in range(apart, together):
            total += add_lane(total, 1 << k)
        return total

    return named(rows_of, sum_of_row)
