"""A 16-bit bias in shared memory: the producer loads it by TMA, and consumers read it in the layout of the scores.

From global memory a lane would load 2 or 4 bytes at a time, of rows far apart, and hold them in registers until the
scores are ready. ldmatrix gives it two neighbouring columns of its rows when it needs them. If the rows of scores are
keys, ldmatrix also transposes the bias.

A tile of some queries and tile_n keys lies in panels of config.bias_panel keys, swizzled (ptx/fragments.py). Past the
last query or key it is 0.
"""

from numba import int32

from ...ptx import ldmatrix, tma
from ..steps.basics import inlined, named, swizzled


def make(config, queries, of_keys=False):
    """-> device functions: fetch, by one thread; place, from the tile's shared address, the warp's first row and the
    lane; and load(four, place, pair), by a whole warp. queries: of a tile. of_keys: rows of scores are keys."""
    panels, row_bytes = config.tile_n // config.bias_panel, 2 * config.bias_panel
    panel_bytes, pairs_of_panel = queries * row_bytes, config.bias_panel // 16
    maps_address = tma.parameter(f"numba_flash_{config.kernel}")
    map_at = 128 * (config.tensor_maps - 1)  # the last of the kernel's tensor maps

    @inlined
    def fetch(to, full, first_query, first_key, h, b, strides):
        of_head = int32(h if strides.bias[1] != 0 else 0)
        of_batch = int32(b if strides.bias[0] != 0 else 0)
        for panel in range(panels):
            key = int32(first_key + panel * config.bias_panel)
            tma.load_4d(to + panel * panel_bytes, maps_address() + map_at, full, key, first_query, of_head, of_batch)

    @inlined
    def place_of_queries(tile, first_row, lane):
        """Matrices of 8 x 8, in order: upper and lower 8 rows of the first 8 keys, then of the next 8 keys."""
        return tile + swizzled(int32((first_row + (lane & 15)) * row_bytes + ((lane >> 4) << 4)), row_bytes)

    @inlined
    def load_of_queries(four, place, pair):
        ldmatrix.x4(four, 0, (place ^ ((pair % pairs_of_panel) << 5)) + (pair // pairs_of_panel) * panel_bytes)

    @inlined
    def place_of_keys(tile, first_row, lane):
        """Matrices of 8 x 8, in order: upper and lower 8 keys of the first 8 queries, then of the next 8 queries."""
        query, key = ((lane >> 4) << 3) + (lane & 7), first_row + (lane & 8)
        in_panel = int32(query * row_bytes + (key % config.bias_panel) * 2)
        return tile + int32(key // config.bias_panel) * panel_bytes + swizzled(in_panel, row_bytes)

    @inlined
    def load_of_keys(four, place, pair):
        ldmatrix.x4_trans(four, 0, place + pair * (16 * row_bytes))

    place, load = (place_of_keys, load_of_keys) if of_keys else (place_of_queries, load_of_queries)
    # load: four (2, 2) <- for each half of the pair-th 16 columns the lane's two rows; two columns in a register.
    return named(fetch, place=place, load=load, present=config.bias_boxes)
