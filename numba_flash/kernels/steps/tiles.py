"""Copying tiles from global to shared memory."""

from numba import cuda


def loader(load, zero):
    """load_tile(...) with `load` of steps.elements and a zero of the computing type."""

    @cuda.jit(device=True)
    def load_tile(
        tile, tile_rows, tile_row, source, base, row_stride, column_stride, rows, columns, thread, threads
    ):  # fmt: skip
        """tile (tile_rows, tile_row) <- rows x columns of source, zeros around them.

        Consecutive threads read consecutive columns. What lies past `rows` is not read at all, so that
        NaN in the padding of a cache cannot come in. The caller owes a barrier before and after.
        """
        for index in range(thread, tile_rows * tile_row, threads):
            row = index // tile_row
            column = index % tile_row
            value = zero
            if row < rows and column < columns:
                value = load(source, base + row * row_stride + column * column_stride)
            tile[index] = value

    return load_tile
