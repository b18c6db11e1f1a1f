"""Loads tiles for a block of a pair (paired_tiles.py). It is like backward_producer_float32.py, but loads only the
block's half of the columns, panel by panel.

A panel takes the place of the other kind of tile's panel of the step before.
"""

from numba import int32, int64, uint32

from ...ptx import bar, cluster, fence, local, mbarrier
from ..steps.inlined import inlined
from . import paired_tiles, parts
from .backward_producer_float32 import Producer, hand_over, own_thread, sources, walk


def of_panel(rows, head_dim, half, panel, part_bytes):
    """-> (number of uint32 that a thread needs, fetch, store), as in parts.loader, for one panel of 64 columns.

    head_dim: of the whole tile; half: columns of the first block. The second block may have fewer, or none; missing
    ones are zeros.
    """
    first, second = (min(max(columns - 64 * panel, 0), 64) for columns in (min(half, head_dim), head_dim - half))
    words, fetch_first, store = parts.loader(rows, first or 64, 64, 0, part_bytes)
    _, fetch_second, _ = parts.loader(rows, second or 64, 64, 0, part_bytes)
    has_first, has_second, same, step = int(first > 0), int(second > 0), first == second, 4 * half

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


def make(config):
    """-> Producer."""
    of_keys, at, plan, panel_bytes = config.of_keys, config.barriers(), config.shared_layout(), config.panel_bytes
    (steps_of, first_step, step_behind), (source_of, own_source_of) = walk(config), sources(config)
    place_of_a, place_of_b, empty_of_a = paired_tiles.places(config)
    of_a = config.stream_rows, config.head_dim, config.head_dim_padded
    of_b = config.stream_rows, config.head_dim_v, config.head_dim_v_padded
    stream_part = config.stream_rows * 128  # the parts of a panel are contiguous
    two_a, two_b = config.head_dim_padded > 64, config.head_dim_v_padded > 64
    raw_words, fetch_a, store_a = of_panel(*of_a, 0, stream_part)
    _, fetch_b, store_b = of_panel(*of_b, 0, stream_part)
    _, fetch_second_a, store_second_a = of_panel(*of_a, 1, stream_part)
    _, fetch_second_b, store_second_b = of_panel(*of_b, 1, stream_part)

    @inlined
    def produce(base, arrays, strides, sizes):
        raw, second = local.array(raw_words, uint32), local.array(raw_words, uint32)  # of each panel
        two = local.array(2, uint32)
        array_a, of_a = (arrays.q, strides.q) if of_keys else (arrays.k, strides.k)
        array_b, of_b = (arrays.do, strides.do) if of_keys else (arrays.v, strides.v)
        step, steps = first_step(base), steps_of(base)
        while step.n < steps:
            n, before = step.n, int32(step.n - 1)
            source, rows_left = source_of(base, step, array_a, of_a, arrays, strides, sizes)
            fetch_a(raw, source, 4 * of_a[2], rows_left, own_thread())
            if two_a:
                fetch_second_a(second, source, 4 * of_a[2], rows_left, own_thread())
            mbarrier.wait(base + at.b_empty, before & 1)
            store_a(raw, place_of_a(base, n), two, own_thread())
            hand_over(base + at.a_full)
            if two_a:
                mbarrier.wait(base + at.b_empty + 8, before & 1)
                store_second_a(second, int32(place_of_a(base, n) + panel_bytes), two, own_thread())
                hand_over(base + at.a_full + 8)
            source, rows_left = source_of(base, step, array_b, of_b, arrays, strides, sizes)
            fetch_b(raw, source, 4 * of_b[2], rows_left, own_thread())
            if two_b:
                fetch_second_b(second, source, 4 * of_b[2], rows_left, own_thread())
            mbarrier.wait(empty_of_a(base, before), before >> 1 & 1)
            store_b(raw, place_of_b(base, n), two, own_thread())
            hand_over(base + at.b_full)
            if two_b:
                mbarrier.wait(empty_of_a(base, before) + 8, before >> 1 & 1)
                store_second_b(second, int32(place_of_b(base, n) + panel_bytes), two, own_thread())
                hand_over(base + at.b_full + 8)
            step = step_behind(base, step)

    def loader(head_dim, half, own, of_own):
        """-> load, a device function. The panels of each part of an own tile are contiguous."""
        rows, panels = config.own_rows, -(-half // 64)
        words, fetch, store = of_panel(rows, head_dim, half, 0, panels * rows * 128)
        _, fetch_second, store_second = of_panel(rows, head_dim, half, 1, panels * rows * 128)

        @inlined
        def load(base, me, arrays, strides, sizes):
            raw, two = local.array(words, uint32), local.array(2, uint32)
            array, of_array = of_own(arrays, strides)
            source, rows_left = own_source_of(base, array, of_array, arrays, strides, sizes)
            fetch(raw, source, 4 * of_array[2], rows_left, own_thread())
            store(raw, int32(base + own), two, own_thread())
            if panels > 1:
                fetch_second(raw, source, 4 * of_array[2], rows_left, own_thread())
                store_second(raw, int32(base + own + rows * 128), two, own_thread())
            fence.proxy_async()
            bar.sync(me + 3, 128)

        return load

    @inlined
    def own_a(arrays, strides):
        return (arrays.k, strides.k) if of_keys else (arrays.q, strides.q)

    @inlined
    def own_b(arrays, strides):
        return (arrays.v, strides.v) if of_keys else (arrays.do, strides.do)

    load_own_a = loader(config.head_dim, config.head_dim_padded, plan.own_a, own_a)
    load_own_b = loader(config.head_dim_v, config.head_dim_v_padded, plan.own_b, own_b)
    return Producer(steps_of, first_step, step_behind, produce, load_own_a, load_own_b)
