"""Loads tiles from global to shared memory, one element for each thread at a time."""

import functools

from numba import cuda

from . import elements
from .sequence import key_row, query_row


def query_loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h, first_row, thread), for tiles of Q or dO: config.tile_m rows,
    tile_row elements apart, of which `columns` are read."""
    return _loader(config.dtype, config.tile_m, tile_row, columns, config.threads, False)


def key_loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h_kv, first_row, thread): the same for tiles of K or V, of config.tile_n
    rows. Keys that are not valid are not read."""
    return _loader(config.dtype, config.tile_n, tile_row, columns, config.threads, True)


@functools.cache
def _loader(dtype, tile_rows, tile_row, columns, threads, of_keys):
    compute = elements.COMPUTE_TYPES[dtype]
    load_element, zero = elements.loader(dtype, compute), compute(0)

    @cuda.jit(device=True)
    def load(tile, source, strides, sequence, head, first_row, thread):
        """tile (tile_rows, tile_row) <- rows x columns of source from first_row on, surrounded by zeros.

        strides: (batch, head, row, column) of source. Consecutive threads read consecutive columns. Rows past the last
        are not read, so NaN in the padding of a cache cannot get in. The caller owes a barrier before and after.
        """
        if of_keys:
            base, rows = key_row(strides, sequence, head, first_row), sequence.keys - first_row
        else:
            base, rows = query_row(strides, sequence, head, first_row), sequence.seqlen_q - first_row
        for index in range(thread, tile_rows * tile_row, threads):
            row = index // tile_row
            column = index % tile_row
            value = zero
            if row < rows and column < columns:
                value = load_element(source, base + row * strides[2] + column * strides[3])
            tile[index] = value

    return load
