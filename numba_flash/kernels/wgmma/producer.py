"""The threads that supply the consumers of a wgmma block: the scheduler (query tiles and Q), the producer (K and V),
and a third one for a bias that TMA loads.

Each role is one thread. TMA loads the tiles. At `full` mbarriers consumers wait for a tile, at `empty` ones they
release it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, int64

from ...ptx import special, tma
from ..score import tile_walk
from ..steps.inlined import inlined
from ..steps.integers import divide
from . import barriers, bias_boxes, query_tiles
from .barriers import word_alone
from .block import BEGIN, FIRST_ROW, H_KV, MEMBERS, STATES, STOP, B, H
from .pipeline import Pipeline


class Tiles(NamedTuple):
    """Where tiles of K or of V are."""

    ring: Pipeline
    at: int
    bytes: int
    panels: int
    map_at: int  # where its tensor map is among the kernel's


class Roles(NamedTuple):
    """Device functions. Each but the first is one thread's whole work."""

    set_up: Callable[..., Any]  # (base): initialises the mbarriers
    schedule: Callable[..., Any]  # (base, counter, arrays, strides, sizes)
    produce: Callable[..., Any]  # (base, arrays, strides)
    produce_bias: Callable[..., Any]  # (base, arrays, strides)


def make(config):
    plan = config.shared_layout()
    q_panel, kv_panel = config.tile_m * 128, config.tile_n * 128  # bytes of 64 columns
    k_panels, v_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = q_panel * k_panels, kv_panel * k_panels, kv_panel * v_panels
    rings = barriers.make(config)
    fetch_bias = bias_boxes.make(config, 64).fetch
    maps_address = tma.parameter("numba_flash_wgmma")
    work = query_tiles.make(config)
    walk = tile_walk.make(config)
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
        b, h, first_query = work.publish(base, i, t, arrays, strides, sizes)
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
            more = word_alone(rings.work_tile(base, i), MEMBERS)
            if more != 0:
                rings.asked.consumer_wait(base, i)
                t = work.following(t, counter)
            i = int32(i + 1)
        work.reset(counter)

    @inlined
    def produce(base, arrays, strides):
        """The producer, one thread: loads K and V in the order in which the consumers need them."""
        n = int32(0)  # number of K and V tiles so far
        i = int32(0)  # number of query tiles so far
        work_tile = rings.work_tile(base, i)
        rings.tiles.consumer_wait(base, i)
        load_k(base, n, int32(word_alone(work_tile, STOP) - 1), word_alone(work_tile, H_KV), word_alone(work_tile, B))
        while word_alone(work_tile, MEMBERS) != 0:
            next_tile = rings.work_tile(base, int32(i + 1))
            begin, j = word_alone(work_tile, BEGIN), int32(word_alone(work_tile, STOP) - 1)
            ask_at, behind_j = min(begin + 1, j), j
            if walk.present:
                states, alone = word_alone(work_tile, STATES), j == begin
            while j >= begin:
                # Ask for the next query tile now: earlier, the block would hold a query tile while others are idle;
                # later, its Q and its first K would arrive too late.
                if walk.present:
                    behind_j = walk.next_tile(states, j, begin, arrays, strides)
                    rings.asked.producer_commit(base, i, alone or behind_j == begin)
                else:
                    rings.asked.producer_commit(base, i, j == ask_at)
                source, next_j = work_tile, int32(behind_j if walk.present else j - 1)
                if j == begin:
                    rings.tiles.consumer_wait(base, int32(i + 1))
                    source, next_j = next_tile, int32(word_alone(next_tile, STOP) - 1)
                # The next K, possibly of the next query tile, comes before this V: this is the order of the products.
                load_k(base, int32(n + 1), next_j, word_alone(source, H_KV), word_alone(source, B))
                load_v(base, n, j, word_alone(work_tile, H_KV), word_alone(work_tile, B))
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
        while word_alone(work_tile, MEMBERS) != 0:
            begin, j = word_alone(work_tile, BEGIN), int32(word_alone(work_tile, STOP) - 1)
            b, h, first_query = word_alone(work_tile, B), word_alone(work_tile, H), word_alone(work_tile, FIRST_ROW)
            states = word_alone(work_tile, STATES) if walk.present else int32(0)
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

    return Roles(barriers.starter(config, 1), schedule, produce, produce_bias)
