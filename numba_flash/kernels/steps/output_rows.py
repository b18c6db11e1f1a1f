"""Rows of O from shared to global memory, 16 bytes a lane where the output allows it."""

from numba import cuda, int32, int64, uint32

from ...ptx import ld_st, memory
from .inlined import inlined
from .plain import panel_offset


def make(config, warp_rows, columns, own_place=False):
    """-> store_rows(first_row, lane, o_smem, notes, o, o_strides, b, h, first_query, seqlen_q, part), a device function
    for one warp and its warp_rows rows from first_row on, the part-th `columns` of them; rows that are to be repaired
    are left out.

    O is staged in panels (ptx/fragments.py), in a tile of its rows or with own_place in one of the warp's rows alone,
    which only 16 bytes at a time are taken from. Notes as in steps/repair_rows.
    """
    tile_m = warp_rows if own_place else config.tile_m
    head_dim_v, group, queries, note_bytes = config.head_dim_v, config.group, config.queries, config.NOTE_BYTES
    panels, steps = -(-columns // 64), warp_rows // 4
    word_count = 4 * panels
    load_b32, load_v4 = ld_st.load_b32, ld_st.load_v4
    address, store_v4, store_b16 = memory.address, memory.store_v4, memory.store_b16

    @inlined
    def store_wide(first_row, lane, o_smem, notes, o, o_strides, b, h, first_query, seqlen_q, part):
        # Eight lanes a row and panel. What does not wait for each other stands side by side: a warp that wrote one
        # piece after the other would take as long as two tiles of keys.
        words = cuda.local.array(word_count, uint32)
        queries_left = int32(min(seqlen_q - first_query, queries))
        # The last panel may reach past this part, and what lies there is the next part's.
        columns_left = int32(min(head_dim_v - part * columns, columns)) - ((lane & 7) << 3)
        top_row = int32(first_row + (lane >> 3))
        o_base = b * o_strides[0] + (part * columns + ((lane & 7) << 3)) * o_strides[3]
        top = address(o, o_base + h * o_strides[1] + (first_query + top_row) * o_strides[2])
        for step in range(steps):
            row = int32(top_row + 4 * step)
            flag = load_b32(notes + row * note_bytes)
            staged = o_smem + panel_offset(row - first_row if own_place else row, lane & 7, tile_m)
            to = top + step * (8 * o_strides[2])  # 4 rows further, if each is a query
            if group > 1:
                at = o_base + (h + row % group) * o_strides[1] + (first_query + row // group) * o_strides[2]
                to = address(o, at)
            for panel in range(panels):
                load_v4(words, 4 * panel, staged + panel * (tile_m * 128))
            here = flag == 0 and int32(row // group) < queries_left
            for panel in range(panels):
                if here and 64 * panel < columns_left:
                    store_v4(to + int64(128 * panel), words, 4 * panel)

    @inlined
    def store_narrow(first_row, lane, o_smem, notes, o, o_strides, b, h, first_query, seqlen_q, part):
        queries_left = int32(min(seqlen_q - first_query, queries))
        columns_left = int32(head_dim_v - part * columns)
        o_base = b * o_strides[0] + part * columns * o_strides[3]
        for index in range(lane, warp_rows * columns, 32):
            in_warp = int32(uint32(index) // uint32(columns))
            row, column = first_row + in_warp, index - in_warp * columns
            query, member = row // group, row % group
            if query < queries_left and column < columns_left and load_b32(notes + row * note_bytes) == 0:
                pair = load_b32(o_smem + panel_offset(row, column >> 3, tile_m) + ((column & 6) << 1))
                half = uint32(pair >> uint32(16)) if column % 2 else pair
                at = o_base + (h + member) * o_strides[1] + (first_query + query) * o_strides[2]
                store_b16(address(o, at + column * o_strides[3]), half)

    return store_wide if config.wide_o else store_narrow
