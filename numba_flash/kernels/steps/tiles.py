"""Loads tiles from global to shared memory, one element for each thread at a time."""

import functools

from numba import cuda

from . import elements
from .inlined import inlined
from .sequence import key_row, query_row


@functools.cache
def query_loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h, first_row, thread), for tiles of Q or dO: config.tile_m rows,
    tile_row elements apart, of which `columns` are read."""
    load_tile = _loader(config.dtype, config.tile_m, tile_row, columns, config.threads)

    @inlined
    def load(tile, source, strides, sequence, h, first_row, thread):
        base = query_row(strides, sequence, h, first_row)
        load_tile(tile, source, base, strides, sequence.seqlen_q - first_row, thread)

    return load


@functools.cache
def key_loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h_kv, first_row, thread): the same for tiles of K or V, of config.tile_n
    rows. Keys that are not valid are not read."""
    load_tile = _loader(config.dtype, config.tile_n, tile_row, columns, config.threads)

    @inlined
    def load(tile, source, strides, sequence, h_kv, first_row, thread):
        base = key_row(strides, sequence, h_kv, first_row)
        load_tile(tile, source, base, strides, sequence.keys - first_row, thread)

    return load


@functools.cache
def _loader(dtype, tile_rows, tile_row, columns, threads):
    compute = elements.COMPUTE_TYPES[dtype]
    load, zero = elements.loader(dtype, compute), compute(0)

    @cuda.jit(device=True)
    def load_tile(tile, source, base, strides, rows, thread):
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
