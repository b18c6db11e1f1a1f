"""Writes O of a query tile in 16 bits, through shared memory."""

from numba import cuda, float32, int32, uint32

from ...ptx import cvt, ld_st, shfl
from ..steps import output_rows
from ..steps.basics import first_column_of, first_row_of, inlined, panel_offset
from ..steps.sequence import lse_row
from ..steps.units import exponent_unit


def make(config, warp_rows):
    """-> write_rows, a device function."""
    rows, o_blocks = warp_rows // 8, config.head_dim_v_padded // 8
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    store_rows = output_rows.make(config, warp_rows, config.head_dim_v_padded)
    to_natural = float32(1 / exponent_unit(config))

    @inlined
    def write_rows(acc_o, inverse_l, lse, o_smem, row_states, first_row, lane, work, arrays, strides, sizes):
        """Writes O and lse of the rows that are finite: O, divided, by way of shared memory. -> whether a row of which
        the lane has a part is not. row_states: room for a flag of each row (kernels/recompute/rows.py)."""
        lane_row, lane_column = first_row + int32(first_row_of(lane)), int32(first_column_of(lane))
        some, sequence = uint32(0), work.sequence
        for r in range(rows):
            strip, below = r // 2, r % 2
            tile_row = lane_row + r * 8
            nonfinite = float32(0)
            for n in range(o_blocks):
                at = (strip * o_blocks + n) * 4 + below * 2
                low, high = acc_o[at] * inverse_l[r], acc_o[at + 1] * inverse_l[r]
                nonfinite += low * float32(0) + high * float32(0)  # NaN when one of them is NaN or Inf
                ld_st.store_b32(o_smem + panel_offset(tile_row, n, config.tile_m) + 2 * lane_column, pack(low, high))
            nonfinite += shfl.bfly_f32(nonfinite, 1)
            nonfinite += shfl.bfly_f32(nonfinite, 2)
            flag = uint32(0) if nonfinite == 0 else uint32(1)
            some |= flag
            if lane & 3 == 0:
                ld_st.store_b32(row_states + tile_row * config.ROW_STATE_BYTES, flag)
                query = work.first_query + tile_row // config.group_size
                if config.write_lse and work.part == 0 and query < sequence.seqlen_q:
                    row_lse = lse[r] * to_natural
                    arrays.lse[lse_row(sequence, work.h + tile_row % config.group_size, query, sizes)] = row_lse
        cuda.syncthreads()
        store_rows(first_row, lane, o_smem, row_states, work, arrays, strides)
        return some

    return write_rows
