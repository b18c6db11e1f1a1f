"""The parts of panels of 64 columns, of the half of a tile's columns that a block of a pair has (backward_paired.py).

The second half may have fewer columns than the first, or none: what it lacks is zero.
"""

from numba import cuda, int32, int64, uint32

from ...ptx import cluster
from ..steps.inlined import inlined
from . import parts

def _of_panel(rows, head_dim, half, panel, part_bytes):
    """-> (how many uint32 a thread needs, fetch, store), as of parts.loader, of one panel.

    head_dim: of the whole tile; half: columns of the first block.
    """
    first, second = (min(max(columns - 64 * panel, 0), 64) for columns in (min(half, head_dim), head_dim - half))
    words, fetch_first, store = parts.loader(rows, first or 64, 64, 0, part_bytes)
    _, fetch_second, _ = parts.loader(rows, second or 64, 64, 0, part_bytes)
    has_first, has_second, same = int(first > 0), int(second > 0), first == second
    step = 4 * half

    @inlined
    def fetch(raw, source, row_bytes, rows_left, thread):
        """source: of the whole tile."""
        rank = cluster.rank()
        place = source + int64(rank * step + 256 * panel)
        if same or rank == 0:
            fetch_first(raw, place, row_bytes, int64(0), int32(0), int32(rows_left * has_first), thread)
        else:
            fetch_second(raw, place, row_bytes, int64(0), int32(0), int32(rows_left * has_second), thread)

    return words, fetch, store


def of_streamed(config, head_dim, half):
    """-> (words, fetches, stores), device functions for each panel. Parts of a panel lie behind each other."""
    rows = config.stream_rows
    made = [_of_panel(rows, head_dim, half, panel, rows * 128) for panel in range(-(-half // 64))]
    return made[0][0], [fetch for _, fetch, _ in made], [store for _, _, store in made]


def of_own(config, head_dim, half):
    """-> (words, load), a device function for a block's own tile. Panels of a part lie behind each other."""
    rows, panels = config.own_rows, -(-half // 64)
    made = [_of_panel(rows, head_dim, half, panel, panels * rows * 128) for panel in range(panels)]
    (words, fetch_first, store_first), (_, fetch_second, store_second) = made[0], made[-1]

    @inlined
    def load(raw, source, row_bytes, rows_left, target, thread):
        two = cuda.local.array(2, uint32)
        fetch_first(raw, source, row_bytes, rows_left, thread)
        store_first(raw, target, two, thread)
        if panels > 1:
            fetch_second(raw, source, row_bytes, rows_left, thread)
            store_second(raw, int32(target + rows * 128), two, thread)

    return words, load
