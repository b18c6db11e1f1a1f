"""Writes float32 rows of a tile, of O or of a gradient, from wgmma's accumulators to global memory: four lanes write 32
contiguous bytes of a row."""

import functools

import numpy as np
from numba import float32, int32, uint32

from ...ptx import bar, cluster, ld_st, local, memory, shfl
from ..steps import elements
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of
from ..steps.sequence import lse_row, query_row
from ..steps.sequence import queries as make_queries
from ..steps.units import exponent_unit

FIRST, SECOND = (np.int32(i) for i in range(2))  # not Python ints: see inlined.py


def row_writer(blocks, columns, vectorized):
    """-> write_row, a device function, for rows of `columns` columns. A lane has their numbers as (blocks, 4).

    vectorized: two columns can be written at a time.
    """
    store, store_v2 = elements.storer("float32"), memory.store_v2

    @inlined
    def write_row(acc, r, lane, target, row_at, column_stride):
        """Writes the lane's row r to the row that begins at element row_at of target."""
        two = local.array(2, uint32)
        first = int32(first_column_of(lane))
        to = memory.address(target, row_at + first * column_stride)
        for n in range(blocks):
            x = 4 * n + 2 * r
            if vectorized:
                two[0], two[1] = acc[x].view(np.uint32), acc[x + 1].view(np.uint32)
                if first + 8 * n < columns:
                    store_v2(to + 32 * n, two, 0)
            else:
                for i in range(2):
                    column = int32(first + 8 * n + i)
                    if column < columns:
                        store(target, row_at + column * column_stride, acc[x + i])

    return write_row


def output_writer(config):
    """-> write_rows, a device function.

    A warp writes the 16 rows of a QueryTile from first_row on, with their lse. It does not write O of a row that is not
    finite, but marks the row in row_states. -> whether the lane has a part of such a row.
    """
    group, blocks = config.group_size, config.head_dim_v_padded // 8
    write_row, queries_of = row_writer(blocks, config.head_dim_v, config.o_vectorized), make_queries(config)
    to_natural = float32(1 / exponent_unit(config))

    @inlined
    def divide_row(acc_o, r, inverse):
        """Divides the lane's row r by its sum. -> whether the whole row, which four lanes share, is finite."""
        even, odd = float32(0), float32(0)
        for n in range(blocks):
            acc_o[4 * n + 2 * r] *= inverse
            acc_o[4 * n + 2 * r + 1] *= inverse
            even += acc_o[4 * n + 2 * r] * float32(0)  # NaN when it is NaN or Inf
            odd += acc_o[4 * n + 2 * r + 1] * float32(0)
        nonfinite = even + odd
        nonfinite += shfl.bfly_f32(nonfinite, 1)
        nonfinite += shfl.bfly_f32(nonfinite, 2)
        return nonfinite == float32(0)

    @inlined
    def finish_row(r, acc_o, inverse_l, lse, row_states, first_row, lane, tile, arrays, strides, sizes):
        row = first_row + first_row_of(lane) + 8 * r
        query = divide(row, group)
        head, index = tile.h + row - query * group, tile.first_query + query
        sequence, finite = queries_of(tile.b, arrays, strides, sizes), divide_row(acc_o, r, inverse_l[r])
        if lane & 3 == 0:
            ld_st.store_b32(row_states + row * config.ROW_STATE_BYTES, uint32(0) if finite else uint32(1))
            if config.write_lse and index < sequence.seqlen_q:
                arrays.lse[lse_row(sequence, head, index, sizes)] = lse[r] * to_natural
        if finite and index < sequence.seqlen_q:
            write_row(acc_o, r, lane, arrays.o, query_row(strides.o, sequence, head, index), strides.o[3])
        return uint32(0) if finite else uint32(1)

    @inlined
    def write_rows(acc_o, inverse_l, lse, row_states, first_row, lane, tile, arrays, strides, sizes):
        some = finish_row(int32(0), acc_o, inverse_l, lse, row_states, first_row, lane, tile, arrays, strides, sizes)
        some |= finish_row(int32(1), acc_o, inverse_l, lse, row_states, first_row, lane, tile, arrays, strides, sizes)
        bar.warp_sync()  # the whole warp reads the marks
        return some

    return write_rows


@functools.cache
def gradient_writer(columns, padded, of_row=None):
    """-> store, a device function, for a gradient of `columns` columns. A lane has its sums as (padded / 8, 4).

    of_row: number of columns of a whole row, if these are only a part.
    """
    blocks = padded // 8
    write_row = row_writer(blocks, columns, (of_row or columns) % 2 == 0)

    @inlined
    def store_row(r, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        row = int32(first_row_of(lane)) + 8 * r
        counts, nonfinite = row < rows_that_count, float32(0)
        for n in range(blocks):
            for x in range(2):
                at = 4 * n + 2 * r + x
                acc[at] = acc[at] * factor if counts else float32(0)
                nonfinite += acc[at] * float32(0)  # NaN when it is NaN or Inf
        nonfinite += shfl.bfly_f32(nonfinite, 1)
        nonfinite += shfl.bfly_f32(nonfinite, 2)
        finite = nonfinite == float32(0)
        if finite and row < rows_left:
            write_row(acc, r, lane, target, base + row * row_stride, 1)
        return uint32(0) if finite else uint32(1) << uint32(row)

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        """Writes factor times a warp's 16 rows, and zeros from row rows_that_count on. The first row begins at element
        `base`.

        -> a bit for each row that is not finite and so is not stored; the same in all lanes.
        """
        found = store_row(FIRST, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        found |= store_row(SECOND, acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        for distance in (1, 2, 4, 8, 16):
            found |= shfl.bfly_b32(found, distance)
        return found

    return store


@functools.cache
def gradient_writer_of_block(config, head_dim, padded):
    """-> store, as above, for the columns of a gradient of head_dim that a block has: all, or half of them in a pair.

    padded: of the first block's half; base: of the whole row.
    """
    if not config.paired:
        return gradient_writer(head_dim, padded)
    second = max(head_dim - padded, 0)
    store_first, store_second = (
        gradient_writer(min(padded, head_dim), padded, head_dim),
        gradient_writer(second, padded, head_dim),
    )
    same = second == padded

    @inlined
    def store(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count):
        rank = cluster.rank()
        base += rank * padded
        if same or rank == 0:
            found = store_first(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        else:
            found = store_second(acc, factor, lane, target, base, row_stride, rows_left, rows_that_count)
        return found

    return store
