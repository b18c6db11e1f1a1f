"""The threads that supply the consumers of a wgmma block: the scheduler (query tiles and Q), the producer (K and V),
and a third one for a bias that TMA loads.

Each role is one thread. TMA loads the tiles. At `full` mbarriers consumers wait for a tile, at `empty` ones they
release it.
"""

from typing import NamedTuple

from numba import int32, int64

from ...ptx import mbarrier, special, tma
from ..score import tile_walk
from ..steps.inlined import inlined
from ..steps.integers import divide
from . import barriers, bias_boxes, query_tiles
from .barriers import BEGIN, FIRST_QUERY, H_KV, STATES, STOP, WORK, B, H
from .pipeline import Pipeline
from .query_tiles import field_of


class Tiles(NamedTuple):
    """Where tiles of K or of V are."""

    ring: Pipeline
    at: int
    bytes: int
    panels: int
    map_at: int  # where its tensor map is among the kernel's


def make(config):
    """-> (set_up, schedule, produce, produce_bias), device functions: initialisation of the mbarriers, and the
    roles."""
    plan = config.shared_layout()
    q_panel, kv_panel = config.tile_m * 128, config.tile_n * 128  # bytes of 64 columns
    k_panels, v_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = q_panel * k_panels, kv_panel * k_panels, kv_panel * v_panels
    rings = barriers.make(config)
    fetch_bias = bias_boxes.make(config, 64).fetch
    maps_address = tma.parameter("numba_flash_wgmma")
    publish_tile, following, set_back = query_tiles.make(config)
    walk = tile_walk.make(config)
    set_up = barriers.starter(config, 1)
    k_tiles = Tiles(rings.k, plan.k, k_bytes, k_panels, 128)
    v_tiles = Tiles(rings.v, plan.v, v_bytes, v_panels, 256)

    @inlined
    def load_q(base, i, h, first_query, b):
        """Loads Q of the i-th query tile."""
        full = rings.q.producer_expect(base, i, q_bytes)
        for panel in range(k_panels):
            to = base + rings.q.stage(i) * q_bytes + panel * q_panel
            tma.load_5d(to, maps_address(), full, panel * 64, 0, first_query, divide(h, config.group_size), b)

    @inlined
    def prefetch_q(h, first_query, b):
        """Prefetches Q of a query tile into L2, because shared memory has no room for it yet."""
        for panel in range(k_panels):
            tma.prefetch_5d(maps_address(), panel * 64, 0, first_query, divide(h, config.group_size), b)

    def loader(tiles):
        @inlined
        def load(base, n, j, h_kv, b):
            """Loads tile j of a head, the block's n-th, of K or of V."""
            full = tiles.ring.producer_expect(base, n, tiles.bytes)
            for panel in range(tiles.panels):
                to = base + tiles.at + tiles.ring.stage(n) * tiles.bytes + panel * kv_panel
                tma.load_4d(to, maps_address() + tiles.map_at, full, panel * 64, j * config.tile_n, h_kv, b)

        return load

    load_k, load_v = loader(k_tiles), loader(v_tiles)

    @inlined
    def claim(base, i, t, arrays, strides, sizes):
        """Query tile t is the block's i-th: publish it and load its Q. If no tile is left, consumers issue S of the
        first query tile and drop it."""
        b, h, first_query = publish_tile(base, i, t, arrays, strides, sizes)
        if config.q_buffers == 1:
            prefetch_q(h, first_query, b)
        load_q(base, i, h, first_query, b)

    @inlined
    def schedule(base, counter, arrays, strides, sizes):
        """The scheduler, one thread: hands out query tiles and loads Q, independently of the producer."""
        i = int32(0)  # number of query tiles so far
        t = int64(special.block_index())
        more = int32(1)
        while more != 0:
            claim(base, i, t, arrays, strides, sizes)
            more = field_of(rings.work_tile(base, i) + WORK)
            if more != 0:
                mbarrier.wait(base + rings.asked, i & 1)
                t = following(t, counter)
            i = int32(i + 1)
        set_back(counter)

    @inlined
    def produce(base, arrays, strides):
        """The producer, one thread: loads K and V in the order in which the consumers need them."""
        n = int32(0)  # number of K and V tiles so far
        i = int32(0)  # number of query tiles so far
        work_tile = rings.work_tile(base, i)
        rings.tiles.consumer_wait(base, i)
        load_k(base, n, int32(field_of(work_tile + STOP) - 1), field_of(work_tile + H_KV), field_of(work_tile + B))
        while field_of(work_tile + WORK) != 0:
            next_tile = rings.work_tile(base, int32(i + 1))
            begin, j = field_of(work_tile + BEGIN), int32(field_of(work_tile + STOP) - 1)
            ask_at, behind_j = min(begin + 1, j), j
            if walk.present:
                states, alone = field_of(work_tile + STATES), j == begin
            while j >= begin:
                # Ask for the next query tile now: earlier, the block would hold a query tile while others are idle;
                # later, its Q and its first K would arrive too late.
                if walk.present:
                    behind_j = walk.next_tile(states, j, begin, arrays, strides)
                    mbarrier.arrive_if(base + rings.asked, alone or behind_j == begin)
                else:
                    mbarrier.arrive_if(base + rings.asked, j == ask_at)
                source, next_j = work_tile, int32(behind_j if walk.present else j - 1)
                if j == begin:
                    rings.tiles.consumer_wait(base, int32(i + 1))
                    source, next_j = next_tile, int32(field_of(next_tile + STOP) - 1)
                # The next K, possibly of the next query tile, comes before this V: this is the order of the products.
                load_k(base, int32(n + 1), next_j, field_of(source + H_KV), field_of(source + B))
                load_v(base, n, j, field_of(work_tile + H_KV), field_of(work_tile + B))
                n = int32(n + 1)
                j = int32(behind_j if walk.present else j - 1)
            i = int32(i + 1)
            work_tile = next_tile

    @inlined
    def produce_bias(base, arrays, strides):
        """One thread: loads the bias of each key tile, for one consumer after the other."""
        n = int32(0)  # number of key tiles so far
        i = int32(0)  # number of query tiles so far
        rings.tiles.consumer_wait(base, i)
        work_tile = rings.work_tile(base, i)
        while field_of(work_tile + WORK) != 0:
            begin, j = field_of(work_tile + BEGIN), int32(field_of(work_tile + STOP) - 1)
            b, h, first_query = field_of(work_tile + B), field_of(work_tile + H), field_of(work_tile + FIRST_QUERY)
            states = field_of(work_tile + STATES) if walk.present else int32(0)
            while j >= begin:
                for consumer in range(config.consumers):
                    full = rings.bias.producer_expect(base + 8 * consumer, n, config.bias_bytes)
                    to = base + plan.bias + (rings.bias.stage(n) * config.consumers + consumer) * config.bias_bytes
                    fetch_bias(to, full, int32(first_query + 64 * consumer), int32(j * config.tile_n), h, b, strides)
                n = int32(n + 1)
                j = int32(walk.next_tile(states, j, begin, arrays, strides) if walk.present else j - 1)
            i = int32(i + 1)
            rings.tiles.consumer_wait(base, i)
            work_tile = rings.work_tile(base, i)

    return set_up, schedule, produce, produce_bias
