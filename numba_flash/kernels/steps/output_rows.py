"""Writes rows of O from a warp's accumulators to global memory, divided and with their lse."""

from numba import int32, uint32

from ...ptx import local
from . import numbers, row_writers
from .basics import TRUE, divide, first_row_of, inlined
from .repeated import repeated
from .sequence import lse_row, query_row
from .units import exponent_unit


def make(config, warp_rows):
    """-> write_rows, a device function of a warp, for warp_rows rows of a query tile."""
    columns, group, in_order = config.group_columns, config.group_size, config.columns_in_order
    write = row_writers.writer(config.dtype, columns // 8, config.o_vectorized, in_order)
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
        if not write(acc_o, r, inverse_l[r], TRUE, lane, exists, arrays.o, row_at, strides.o[3], columns_left):
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
        return row_writers.of_warp(nonfinite[0])

    return write_rows
