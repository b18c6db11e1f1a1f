"""Writes rows of a gradient from a warp's sums to global memory, staged in the block's own tile in shared memory.

Rows of the own tile are read only by the warp that owns them, or by the group of warps that share them. After their
last product these warps may store their gradient there, and no other warp has to wait.
"""

import functools

from numba import float32, int32, int64, uint32

from ...ptx import bar, cvt, ld_st, local, memory, shfl
from .basics import first_column_of, first_row_of, inlined, panel_offset


@functools.cache
def make(dtype, own_rows, warp_rows, columns, wide):
    """-> (stage, store) for a gradient tile of `own_rows` contiguous rows. A warp has `warp_rows` of them, and
    `columns` of their columns, which begin at a panel.

    wide: they can be written 16 bytes at a time.

    store(tile, first_row, lane, target, base, row_stride, rows_left, columns_left, suspects): the warp's rows that
    exist and are not suspects; base: the element index of the tile's row 0 and first column.
    """
    strips, blocks, panels = warp_rows // 16, (columns + 15) // 16 * 2, -(-columns // 64)
    word_count = 4 * panels
    pack = cvt.pack_f16x2 if dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def stage(acc, factor, tile, first_row, lane, rows_that_count):
        """tile <- acc (strips, padded / 8, 4) times factor, in 16 bits; rows from rows_that_count on <- 0.

        first_row: the warp's. -> a bit for each row of the warp that is not finite, the same in all lanes.
        """
        suspects = uint32(0)
        for r in range(2 * strips):
            in_warp = int32(first_row_of(lane)) + r * 8
            row = first_row + in_warp
            counts = row < rows_that_count
            nonfinite = float32(0)
            for n in range(blocks):
                at = ((r // 2) * blocks + n) * 4 + (r % 2) * 2
                low = acc[at] * factor if counts else float32(0)
                high = acc[at + 1] * factor if counts else float32(0)
                nonfinite += low * float32(0) + high * float32(0)  # NaN when one of them is NaN or Inf
                to = tile + panel_offset(row, n, own_rows) + 2 * int32(first_column_of(lane))
                ld_st.store_b32(to, pack(low, high))
            if nonfinite != 0:
                suspects |= uint32(1) << uint32(in_warp)
        for distance in (1, 2, 4, 8, 16):
            suspects |= shfl.bfly_b32(suspects, distance)
        bar.warp_sync()
        return suspects

    @inlined
    def store_wide(tile, first_row, lane, target, base, row_stride, rows_left, columns_left, suspects):
        # Eight lanes for each row and panel. As in steps/output_rows.py, loads are adjacent, and so are stores.
        words = local.array(word_count, uint32)
        column = int32((lane & 7) << 3)
        for step in range(warp_rows // 4):
            in_warp = int32((lane >> 3) + 4 * step)
            row = int32(first_row + in_warp)
            staged = tile + panel_offset(row, lane & 7, own_rows)
            to = memory.address(target, base + row * row_stride + column)
            for panel in range(panels):
                ld_st.load_v4(words, 4 * panel, staged + panel * (own_rows * 128))
            here = row < rows_left and (suspects >> uint32(in_warp)) & uint32(1) == 0
            for panel in range(panels):
                if here and 64 * panel + column < columns_left:
                    memory.store_v4(to + int64(128 * panel), words, 4 * panel)

    @inlined
    def store_narrow(tile, first_row, lane, target, base, row_stride, rows_left, columns_left, suspects):
        for index in range(lane, warp_rows * columns, 32):
            in_warp = int32(uint32(index) // uint32(columns))
            row, column = first_row + in_warp, index - in_warp * columns
            if row < rows_left and column < columns_left and (suspects >> uint32(in_warp)) & uint32(1) == 0:
                pair = ld_st.load_b32(tile + panel_offset(row, column >> 3, own_rows) + ((column & 6) << 1))
                half = uint32(pair >> uint32(16)) if column % 2 else pair
                memory.store_b16(memory.address(target, base + row * row_stride + column), half)

    return stage, store_wide if wide else store_narrow
