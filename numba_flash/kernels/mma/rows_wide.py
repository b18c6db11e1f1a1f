"""O of a query tile in 32 or 64 bits, straight from the accumulators: a lane has 32 bytes of each panel of its rows.

Which columns those are: products_float32.py and products_float64.py.
"""

import numpy as np
from numba import int32, uint32

from ...ptx import bar, ld_st, local, memory
from ..steps import elements, numbers
from ..steps.inlined import TRUE, inlined
from ..steps.plain import first_row_of
from ..steps.repeated import repeated
from ..steps.sequence import lse_row, query_row
from ..steps.units import exponent_unit


def row_writer(dtype, blocks, vectorized, columns_in_order=False):
    """-> write_row, a device function, for rows of `blocks` times 8 columns. vectorized: columns are neighbours, rows
    begin at multiples of 16 bytes and are a multiple of 16 bytes long. columns_in_order: of float64
    (products_float64.py), each block has 8 columns that lie together, and the lane 2 of them."""
    double, item_size = dtype == "float64", 8 if dtype == "float64" else 4
    chunk = 16 // item_size  # elements of 16 bytes; a panel has 8 chunks, and as many blocks as a chunk elements
    halves, step = (1, 2) if columns_in_order else (2, 2 * chunk)  # of a panel; from a lane's columns to the next one's
    store, real = elements.storer(dtype), numbers.of(dtype).real

    @inlined
    def store_16_bytes(values, to):
        if double:
            memory.store_v2_f64(to, values, 0)
        else:
            words = local.array(4, uint32)
            for j in range(4):
                words[j] = values[j].view(np.uint32)
            memory.store_v4(to, words, 0)

    @inlined
    def write_row(acc, r, lane, target, row_at, column_stride, columns_left):
        """Row r of the lane's, to the row that begins at element row_at of target."""
        values = local.array(chunk, real)
        first_column = int32((lane & 3) * step)
        to = memory.address(target, row_at + first_column * column_stride)
        for panel in range(blocks // (chunk if halves == 2 else 1)):
            for half in range(halves):
                ahead = 8 * panel if columns_in_order else (8 * panel + half) * chunk
                for j in range(chunk):
                    block, i = (panel, j) if columns_in_order else (panel * chunk + j, half)
                    values[j] = acc[((r // 2) * blocks + block) * 4 + (r % 2) * 2 + i]
                column = int32(first_column + ahead)
                if vectorized:
                    if column < columns_left:
                        store_16_bytes(values, to + item_size * ahead)
                else:
                    for j in range(chunk):
                        if int32(column + j) < columns_left:
                            store(target, row_at + int32(column + j) * column_stride, values[j])

    return write_row


def row_scaler(compute_dtype, blocks):
    """-> scale_row(acc, r, factor, counts), a device function: row r of the lane's times factor, or 0 where it does not
    count. -> whether it is finite; the same in all lanes of a quad."""
    real, bfly = (made := numbers.of(compute_dtype)).real, made.bfly

    @inlined
    def scale_row(acc, r, factor, counts):
        nonfinite = real(0)
        for n in range(blocks):
            for i in range(2):
                at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i
                acc[at] = acc[at] * factor if counts else real(0)
                nonfinite += acc[at] * real(0)  # NaN when it is NaN or Inf
        nonfinite += bfly(nonfinite, 1)
        nonfinite += bfly(nonfinite, 2)
        return nonfinite == real(0)

    return scale_row


def make(config):
    """-> write_rows, a device function like that of rows_16bit."""
    rows, o_blocks = config.warp_rows // 8, config.group_columns // 8
    write_row = row_writer(config.dtype, o_blocks, config.o_vectorized, config.columns_in_order)
    divide_row = row_scaler(config.compute_dtype, o_blocks)
    to_natural = numbers.of(config.compute_dtype).real(1 / exponent_unit(config))

    @inlined
    def finish_row(r, some, acc_o, inverse_l, lse, row_states, tile, lane, warp, arrays, strides, sizes):
        """some[0] <- 1 where the row is not finite."""
        tile_row = warp * config.warp_rows + int32(first_row_of(lane)) + r * 8
        queries_left = int32(min(tile.sequence.seqlen_q - tile.first_query, config.queries))
        query, head = tile_row // config.group_size, tile.h + tile_row % config.group_size
        flag = uint32(0) if divide_row(acc_o, r, inverse_l[r], TRUE) else uint32(1)
        if lane & 3 == 0:
            ld_st.store_b32(row_states + tile_row * config.ROW_STATE_BYTES, flag)
            if config.write_lse and tile.part == 0 and query < queries_left:
                arrays.lse[lse_row(tile.sequence, head, tile.first_query + query, sizes)] = lse[r] * to_natural
        if flag == 0 and query < queries_left:
            columns_left = int32(min(config.head_dim_v - tile.part * config.group_columns, config.group_columns))
            row_at = query_row(strides.o, tile.sequence, head, tile.first_query + query)
            row_at += tile.part * config.group_columns * strides.o[3]
            write_row(acc_o, r, lane, arrays.o, row_at, strides.o[3], columns_left)
        some[0] |= flag

    finish_every_row = repeated(finish_row, rows)

    @inlined
    def write_rows(acc_o, inverse_l, lse, o_smem, row_states, tile, lane, warp, arrays, strides, sizes):
        some = local.array(1, uint32)
        some[0] = uint32(0)
        finish_every_row(some, acc_o, inverse_l, lse, row_states, tile, lane, warp, arrays, strides, sizes)
        bar.warp_sync()  # the flags are read by the whole warp
        return some[0]

    return write_rows
