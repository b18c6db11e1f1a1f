"""A bias of 16 bits in shared memory: the producer fetches it by TMA, and consumers read it as they hold scores.

From global memory a lane would ask for 2 or 4 bytes at a time, of rows far apart, and keep them in registers until the
scores are there. ldmatrix gives it two neighbouring columns of its rows as they are used; of scores whose rows are keys
it turns the bias around on the way.

A tile of some queries and tile_n keys lies in panels of config.bias_panel keys, swizzled (ptx/fragments.py). What is
past the last query or key is 0.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32

from ...ptx import ldmatrix, tma
from ..steps.inlined import inlined
from ..steps.plain import swizzled


class BiasBoxes(NamedTuple):
    """Device functions."""

    present: bool
    fetch: Callable[..., Any]  # (to, full, first_query, first_key, h, b, strides): by one thread
    place: Callable[..., Any]  # (the tile's shared address, the warp's first row, lane) -> what `load` takes
    load: Callable[..., Any]  # (four, place, pair): by a whole warp


def make(config: Any, queries: int, of_keys: bool = False) -> BiasBoxes:
    """Of tiles of so many queries. of_keys: rows of scores are keys."""
    keys = config.bias_panel
    panels, row_bytes = config.tile_n // keys, 2 * keys
    panel_bytes, pairs_of_panel = queries * row_bytes, keys // 16
    maps_address = tma.parameter(f"numba_flash_{config.kernel}")
    map_at = 128 * (config.tensor_maps - 1)  # the last of the kernel's
    load_4d, x4, x4_trans = tma.load_4d, ldmatrix.x4, ldmatrix.x4_trans

    @inlined
    def fetch(to, full, first_query, first_key, h, b, strides):
        of_head = int32(h if strides.bias[1] != 0 else 0)
        of_batch = int32(b if strides.bias[0] != 0 else 0)
        for panel in range(panels):
            key = int32(first_key + panel * keys)
            load_4d(to + panel * panel_bytes, maps_address() + map_at, full, key, first_query, of_head, of_batch)

    @inlined
    def place_of_queries(tile, first_row, lane):
        """Matrices of 8 x 8: of the first 8 keys the upper 8 rows and the lower ones, then of the next 8 keys."""
        return tile + swizzled(int32((first_row + (lane & 15)) * row_bytes + ((lane >> 4) << 4)), row_bytes)

    @inlined
    def load_of_queries(four, place, pair):
        x4(four, 0, (place ^ ((pair % pairs_of_panel) << 5)) + (pair // pairs_of_panel) * panel_bytes)

    @inlined
    def place_of_keys(tile, first_row, lane):
        """Of the first 8 queries the upper 8 keys and the lower ones, then of the next 8 queries."""
        query, key = ((lane >> 4) << 3) + (lane & 7), first_row + (lane & 8)
        in_panel = int32(query * row_bytes + (key % keys) * 2)
        return tile + int32(key // keys) * panel_bytes + swizzled(in_panel, row_bytes)

    @inlined
    def load_of_keys(four, place, pair):
        x4_trans(four, 0, place + pair * (16 * row_bytes))

    place, load = (place_of_keys, load_of_keys) if of_keys else (place_of_queries, load_of_queries)
    # load: four (2, 2) <- of the pair-th 16 columns each half, with the lane's two rows; two columns in a register.
    return BiasBoxes(config.bias_boxes, fetch, place, load)
