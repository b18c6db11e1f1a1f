"""Rows of O from shared to global memory, 16 bytes a lane where the output allows it."""

from numba import cuda, int32, uint32

from ...ptx import fragments, ld_st, memory

panel_offset = cuda.jit(device=True, inline="always")(fragments.panel_offset)


def make(config, warp_rows):
    """-> store_rows, a device function. O is staged in panels (ptx/fragments.py); notes as in steps/repair_rows."""
    width, tile_m, wide_o = config.width, config.tile_m, config.wide_o
    head_dim_v, group, queries, note_bytes = config.head_dim_v, config.group, config.queries, config.NOTE_BYTES
    step = width // 8 if wide_o else width  # copies in a row
    load_b32, load_v4 = ld_st.load_b32, ld_st.load_v4
    address, store_v4, store_b16 = memory.address, memory.store_v4, memory.store_b16

    @cuda.jit(device=True, inline="always")
    def store_rows(first_row, lane, o_smem, notes, o, o_strides, b, h, first_query, seqlen_q, part):
        """One warp, its warp_rows rows from first_row on; rows that are to be repaired are left out."""
        queries_left = int32(min(seqlen_q - first_query, queries))
        columns_left = int32(head_dim_v - part * width)
        o_base = b * o_strides[0] + part * width * o_strides[3]
        four = cuda.local.array(4, uint32)
        for index in range(lane, warp_rows * step, 32):
            in_warp = int32(uint32(index) // uint32(step))
            row = first_row + in_warp
            query, member = row // group, row % group
            column = (index - in_warp * step) * (8 if wide_o else 1)
            if query < queries_left and column < columns_left and load_b32(notes + row * note_bytes) == 0:
                staged = o_smem + panel_offset(row, column >> 3, tile_m)
                at = o_base + (h + member) * o_strides[1] + (first_query + query) * o_strides[2]
                if wide_o:
                    load_v4(four, 0, staged)
                    store_v4(address(o, at + column), four, 0)
                else:
                    pair = load_b32(staged + ((column & 6) << 1))
                    half = uint32(pair >> uint32(16)) if column % 2 else pair
                    store_b16(address(o, at + column * o_strides[3]), half)

    return store_rows
