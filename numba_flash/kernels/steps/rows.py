"""Products of a thread's own row with a tile in shared memory that all threads read at the same addresses."""

from ...ptx import local
from .basics import inlined

# Rows of tiles are padded with zeros to a multiple of DEPTH, so that no step needs a test.
DEPTH = 4  # elements of a product at a time: one 16-byte read of the common tile


def at_once(tile_rows, dtype="float32"):
    """Number of products computed side by side, so that one read of the own row serves them all. A backward has two
    products, and float64 takes two registers."""
    return 8 if tile_rows % 8 == 0 and dtype != "float64" else 4


def dots(row, count, zero):
    """-> dot_rows for rows of `row` elements, `count` of them at once."""

    @inlined
    def dot_rows(products, own, own_at, tile, tile_at):
        """products (count,) <- the own row times each of `count` rows of the tile, the first of which is at tile_at."""
        for u in range(count):
            products[u] = zero
        for x0 in range(0, row, DEPTH):
            for u in range(count):
                for x in range(x0, x0 + DEPTH):
                    products[u] += own[own_at + x] * tile[tile_at + u * row + x]

    return dot_rows


def adder(row, tile_rows, dtype, compute):
    """-> add_rows for a tile (tile_rows, row)."""
    wide = (8, 4) if dtype == "float64" else (16, 8, 4)
    columns = next(c for c in wide if row % c == 0)  # sums side by side: one read of a weight serves them all

    @inlined
    def add_rows(acc, factor, weights, weights_at, tile, tile_at):
        """acc (row,) <- factor * acc + the own row of weights times the tile, which begins at tile_at.

        A weight of 0 adds nothing, even times NaN or Inf.
        """
        part = local.array(columns, compute)  # (columns,)
        for x0 in range(0, row, columns):
            for x in range(columns):
                part[x] = compute(0)  # a sum of its own: short sums round less than one long one
            for y in range(tile_rows):
                weight = weights[weights_at + y]
                if weight != 0:
                    for x in range(columns):
                        part[x] += weight * tile[tile_at + y * row + x0 + x]
            for x in range(columns):
                acc[x0 + x] = factor * acc[x0 + x] + part[x]

    return add_rows
