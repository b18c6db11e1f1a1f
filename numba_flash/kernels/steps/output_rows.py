"""Stores rows of O from shared to global memory, 16 bytes for each lane if the output allows it."""

from numba import int32, int64, uint32

from ...ptx import ld_st, local, memory
from .basics import inlined, panel_offset
from .sequence import query_row


def make(config, warp_rows, columns):
    """-> store_rows(first_row, lane, o_smem, row_states, work, arrays, strides), a device function.

    A warp stores its warp_rows rows of a QueryWork from first_row on, the work.part-th `columns` of them. It leaves out
    rows that are not finite.

    O is staged in panels (ptx/fragments.py). row_states as in recompute/rows.
    """
    tile_m, panels = config.tile_m, -(-columns // 64)
    word_count = 4 * panels

    @inlined
    def place_of(row, column, work, strides):
        """-> (element index of a column of the tile's part, the query of a row of the tile)."""
        query = row // config.group_size
        at = query_row(strides.o, work.sequence, work.h + row % config.group_size, work.first_query + query)
        return at + (work.part * columns + column) * strides.o[3], query

    @inlined
    def store_wide(first_row, lane, o_smem, row_states, work, arrays, strides):
        # Eight lanes for each row and panel. Independent instructions are adjacent: a warp that wrote one piece after
        # the other would take as long as two key tiles.
        words = local.array(word_count, uint32)
        queries_left = int32(min(work.sequence.seqlen_q - work.first_query, config.queries))
        # The last panel may reach past this part; those columns belong to the next part.
        columns_left = int32(min(config.head_dim_v - work.part * columns, columns)) - ((lane & 7) << 3)
        top_row = int32(first_row + (lane >> 3))
        top = memory.address(arrays.o, place_of(top_row, (lane & 7) << 3, work, strides)[0])
        for step in range(warp_rows // 4):
            row = int32(top_row + 4 * step)
            flag = ld_st.load_b32(row_states + row * config.ROW_STATE_BYTES)
            staged = o_smem + panel_offset(row, lane & 7, tile_m)
            to = top + step * (8 * strides.o[2])  # 4 rows further, if each row is a query
            if config.group_size > 1:
                to = memory.address(arrays.o, place_of(row, (lane & 7) << 3, work, strides)[0])
            for panel in range(panels):
                ld_st.load_v4(words, 4 * panel, staged + panel * (tile_m * 128))
            here = flag == 0 and int32(row // config.group_size) < queries_left
            for panel in range(panels):
                if here and 64 * panel < columns_left:
                    memory.store_v4(to + int64(128 * panel), words, 4 * panel)

    @inlined
    def store_narrow(first_row, lane, o_smem, row_states, work, arrays, strides):
        queries_left = int32(min(work.sequence.seqlen_q - work.first_query, config.queries))
        columns_left = int32(config.head_dim_v - work.part * columns)
        for index in range(lane, warp_rows * columns, 32):
            in_warp = int32(uint32(index) // uint32(columns))
            row, column = first_row + in_warp, index - in_warp * columns
            at, query = place_of(row, column, work, strides)
            finite = ld_st.load_b32(row_states + row * config.ROW_STATE_BYTES) == 0
            if query < queries_left and column < columns_left and finite:
                pair = ld_st.load_b32(o_smem + panel_offset(row, column >> 3, tile_m) + ((column & 6) << 1))
                half = uint32(pair >> uint32(16)) if column % 2 else pair
                memory.store_b16(memory.address(arrays.o, at), half)

    return store_wide if config.o_vectorized else store_narrow
