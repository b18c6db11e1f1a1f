"""Loads tiles from global to shared memory with cp.async, 16 bytes a copy, or fewer where rows do not begin at such
multiples."""

import functools

from numba import int32, int64, uint32

from ...ptx import cp_async, ld_st, memory
from .basics import inlined, panel_offset


@inlined
def aligned(address):
    """The first place from a shared address on where a tile may begin."""
    return int32((address + int32(1023)) & int32(-1024))


@functools.cache
def copier(copy_bytes):
    """-> (bytes, copy(target, source, count)): a function that starts to copy `count` bytes, and zeros up to `bytes`.

    copy_bytes: what addresses in global memory are multiples of. Below 4 there is no cp.async: two numbers of 16 bits
    are loaded, and stored at once.
    """
    if copy_bytes == 16:
        return 16, cp_async.copy16
    if copy_bytes >= 4:
        return copy_bytes, cp_async.small_copy(copy_bytes)

    @inlined
    def copy_pair(target, source, count):
        low = memory.load_b16_if(source, count > 0)
        high = memory.load_b16_if(source + 2, count > 2)
        ld_st.store_b32(target, low | (high << uint32(16)))

    return 4, copy_pair


@functools.cache
def loader(rows, columns, threads, group=1, size=2, copy_bytes=16):
    """-> load(target, source, row_stride, head_stride, rows_left, columns_left, thread).

    The tile is rows (a multiple of 8) x columns (a multiple of 16 bytes) of elements of `size` bytes. It lies at shared
    address `target`, a multiple of 1024, in panels (ptx/fragments.py). group: rows are that many heads of one query,
    head_stride bytes apart; queries are row_stride bytes apart. copy_bytes: addresses of rows are multiples of it.
    """
    piece, copy = copier(copy_bytes)
    pieces = columns * size // piece  # of a row; neighbouring threads copy neighbouring pieces
    total = rows * pieces
    steps = -(-total // threads)
    # If a thread keeps its column from step to step, one addition a step gives the next row. Separate offsets would be
    # computed ahead of the loop over tiles and cost two registers each. If the rows of a step are as many as the
    # swizzle distinguishes, or a half, quarter or eighth of them, the next place in shared memory is a constant away,
    # except for a bit or two of the swizzle. Computing places anew for each copy took a sixth of the backward's time
    # (H200).
    rows_a_step = threads // pieces
    regular = group == 1 and threads % pieces == 0 and (rows_a_step % 8 == 0 or 8 % rows_a_step == 0)

    @inlined
    def offset_of(row, n):
        """The offset of the n-th piece of a row in the tile."""
        if piece == 16:
            return panel_offset(row, n, rows)
        return panel_offset(row, n // (16 // piece), rows) + n % (16 // piece) * piece

    @inlined
    def load(target, source, row_stride, head_stride, rows_left, columns_left, thread):
        """Start the copies; the caller commits, waits and owes a barrier.

        source: global address of row 0. rows_left counts queries if rows are heads. Rows and columns that do not exist
        become zeros and are not read, so NaN in the padding of a cache cannot get in.
        """
        row = int32(uint32(thread) // uint32(pieces))
        n = int32(uint32(thread) % uint32(pieces))
        if regular:
            place = source + int64(row) * row_stride + int64(n * piece)
            to = int32(target + offset_of(row, n))
            left = int32(int32(rows_left) - row)
            count = min(max(size * columns_left - piece * n, 0), piece)
            for step in range(steps):
                # The target is a multiple of 1024, so the swizzle bits of `to` come from row and chunk.
                first = step * rows_a_step
                if total % threads == 0 or row < int32(rows - first):
                    here = (to ^ int32((first & 7) << 4)) + int32(first * 128)
                    copy(here, place, count if left > int32(first) else 0)
                place += rows_a_step * row_stride
        else:
            for step in range(steps):
                index = uint32(thread + step * threads)
                row = int32(index // uint32(pieces))
                n = int32(index % uint32(pieces))
                query = int32(uint32(row) // uint32(group))
                place = source + int64(query) * row_stride + int64(row - query * group) * head_stride
                if total % threads == 0 or row < rows:
                    count = min(max(size * columns_left - piece * n, 0), piece)
                    copy(target + offset_of(row, n), place + n * piece, count if query < rows_left else 0)

    return load


def of(config, threads=0):
    """-> loader(rows, columns, group=1), for the tiles of a kernel. threads: that share a tile, if not all."""

    def of_tile(rows, columns, group=1):
        return loader(rows, columns, threads or config.threads, group, config.item_size, config.copy_bytes)

    return of_tile


def of_backward(config, threads=0):
    """-> (load_q, load_do, load_k, load_v), whole tiles."""
    loads, columns = of(config, threads), (config.head_dim_padded, config.head_dim_v_padded)
    return tuple(loads(rows, width) for rows in (config.tile_m, config.tile_n) for width in columns)


@functools.cache
def panel_loader(rows, columns, threads, whole):
    """-> load(target, source, row_stride, first_row, rows_left, columns_left, thread), for elements of 8 bytes.

    Like that of `loader`, but each thread copies 16 bytes of every panel, so all its addresses are constants apart for
    any number of panels. The tile begins first_row rows after source. rows: a multiple of threads // 8. whole: all
    columns exist, whatever columns_left is.
    """
    rows_a_step, panels = threads // 8, columns // 16
    assert rows % rows_a_step == 0 and rows_a_step % 8 == 0 and columns % 16 == 0

    @inlined
    def load(target, source, row_stride, first_row, rows_left, columns_left, thread):
        row, chunk = thread >> int32(3), thread & int32(7)
        to = int32(target + panel_offset(row, chunk, rows))
        place = source + int64(first_row + row) * row_stride + int64(chunk * 16)
        left = int32(columns_left * 8 - chunk * 16)  # bytes of the row from that chunk on
        for step in range(rows // rows_a_step):
            first = step * rows_a_step
            row_left = 16 if row < int32(rows_left) - first else 0
            for n in range(panels):
                count = row_left if whole else min(max(left - n * 128, 0), row_left)
                cp_async.copy16(to + (n * rows + first) * 128, place + n * 128, count)
            place += rows_a_step * row_stride

    return load
