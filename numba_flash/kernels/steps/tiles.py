"""Loads tiles from global to shared memory, one element for each thread at a time."""

import functools
from typing import Any

from numba import cuda

from .inlined import inlined


@functools.cache
def loader(load: Any, zero: Any, tile_rows: int, tile_row: int, columns: int) -> Any:
    """-> load_tile for tiles of tile_rows rows, tile_row elements apart. load: from steps.elements; zero: in the type
    that the kernel computes in."""

    @cuda.jit(device=True)
    def load_tile(tile, source, base, strides, rows, thread, threads):
        """tile (tile_rows, tile_row) <- rows x columns of source from `base` on, surrounded by zeros.

        strides: (batch, head, row, column) of source. Consecutive threads read consecutive columns. Rows past `rows`
        are not read, so NaN in the padding of a cache cannot get in. The caller owes a barrier before and after.
        """
        for index in range(thread, tile_rows * tile_row, threads):
            row = index // tile_row
            column = index % tile_row
            value = zero
            if row < rows and column < columns:
                value = load(source, base + row * strides[2] + column * strides[3])
            tile[index] = value

    return load_tile


@inlined
def row_base(strides, b, h, row):
    """Element index at which a row of q, k, v, o or of a gradient begins. strides: (batch, head, row, column)."""
    return b * strides[0] + h * strides[1] + row * strides[2]
