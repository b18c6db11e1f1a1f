"""Loads tiles for a block of a pair (paired_tiles.py). It is like backward_producer_float32.py, but loads only the
block's half of the columns, panel by panel.

A panel takes the place of the other kind of tile's panel of the step before.
"""

from numba import int32, int64, uint32

from ...ptx import bar, cluster, fence, local
from ..steps.basics import inlined, named
from . import block, paired_tiles, parts
from .backward_producer_float32 import of_loads, sources
from .block import FIRST_ROW, hand_over, own_thread


def of_panel(rows, head_dim, half, panel, part_bytes):
    """-> as parts.loader for one panel of 64 columns, but for fetch(raw, source, row_bytes, rows_left, thread); source:
    of the whole tile.

    head_dim: of the whole tile; half: columns of the first block. The second block may have fewer, or none; missing
    ones are zeros.
    """
    first, second = (min(max(columns - 64 * panel, 0), 64) for columns in (min(half, head_dim), head_dim - half))
    of_first = parts.loader(rows, first or 64, 64, 0, part_bytes)
    of_second = parts.loader(rows, second or 64, 64, 0, part_bytes)
    has_first, has_second, same, step = int(first > 0), int(second > 0), first == second, 4 * half

    @inlined
    def fetch(raw, source, row_bytes, rows_left, thread):
        rank = cluster.rank()
        place = source + int64(rank * step + 256 * panel)
        if same or rank == 0:
            of_first.fetch(raw, place, row_bytes, int64(0), int32(0), int32(rows_left * has_first), thread)
        else:
            of_second.fetch(raw, place, row_bytes, int64(0), int32(0), int32(rows_left * has_second), thread)

    return named(fetch, words=of_first.words, store=of_first.store)


def make(config):
    """-> as backward_producer_float32.make."""
    plan, word = config.shared_layout(), block.state_of(config).read
    (place_of_a, place_of_b), (ring_a, ring_b) = paired_tiles.places(config), paired_tiles.panel_rings(config)

    def of_tiles(is_a, columns, half, ring, place_of, own_at):
        """The parts of a streamed panel are contiguous; of an own tile, the panels of each part."""
        of_step, of_own = sources(config, is_a)
        rows, own_rows, panels = config.other_rows, config.own_rows, -(-half // 64)
        first, second = (of_panel(rows, columns, half, panel, rows * 128) for panel in range(2))
        own, own_second = (of_panel(own_rows, columns, half, panel, panels * own_rows * 128) for panel in range(2))
        two_panels = panels > 1

        @inlined
        def acquire(base, n):
            """Waits until the tile of the other kind that was there has been read: the last b, or the last a, which is
            two before the next."""
            if is_a:
                ring_b.producer_acquire(base, n)
            else:
                ring_a.producer_acquire(base, int32(n + 1))

        @inlined
        def load(base, step, arrays, strides, sizes):
            raw, second_raw = local.array(first.words, uint32), local.array(first.words, uint32)
            n, two = step.n, local.array(2, uint32)
            source, row_bytes, rows_left = of_step(base, step.member, int32(step.i * rows), arrays, strides, sizes)
            first.fetch(raw, source, row_bytes, rows_left, own_thread())
            if two_panels:
                second.fetch(second_raw, source, row_bytes, rows_left, own_thread())
            acquire(base, n)
            first.store(raw, place_of(base, n), two, own_thread())
            hand_over(ring.full(base, n))
            if two_panels:
                acquire(base + 8, n)
                second.store(second_raw, int32(place_of(base, n) + config.panel_bytes), two, own_thread())
                hand_over(ring.full(base + 8, n))

        @inlined
        def load_own(base, me, arrays, strides, sizes):
            raw, two = local.array(own.words, uint32), local.array(2, uint32)
            source, row_bytes, rows_left = of_own(base, int32(0), word(base, FIRST_ROW), arrays, strides, sizes)
            own.fetch(raw, source, row_bytes, rows_left, own_thread())
            own.store(raw, int32(base + own_at), two, own_thread())
            if two_panels:
                own_second.fetch(raw, source, row_bytes, rows_left, own_thread())
                own_second.store(raw, int32(base + own_at + own_rows * 128), two, own_thread())
            fence.proxy_async()
            bar.sync(me + 3, 128)

        return load, load_own

    a = of_tiles(True, config.head_dim, config.head_dim_padded, ring_a, place_of_a, plan.own_a)
    b = of_tiles(False, config.head_dim_v, config.head_dim_v_padded, ring_b, place_of_b, plan.own_b)
    return of_loads(config, a, b)
