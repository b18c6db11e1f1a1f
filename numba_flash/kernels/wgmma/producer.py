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
from .barriers import BEGIN, FIRST_QUERY, H_KV, STATES, STOP, WORK, WORK_TILES, B, H
from .query_tiles import field_of


class Ring(NamedTuple):
    """Where tiles of K or of V are."""

    full_at: int
    empty_at: int
    tiles_at: int
    tile_bytes: int
    panels: int
    map_at: int  # where its tensor map is among the kernel's


def make(config):
    """-> (set_up, schedule, produce, produce_bias), device functions: initialisation of the mbarriers, and the
    roles."""
    tile_m, tile_n, consumers = config.tile_m, config.tile_n, config.consumers
    stages, q_buffers = config.stages, config.q_buffers
    group = config.group_size
    _, k_at, v_at, bias_at, *_ = config.shared_offsets()
    bias_bytes, bias_stages = config.bias_bytes, max(config.bias_stages, 1)
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes of 64 columns
    k_panels, v_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = q_panel * k_panels, kv_panel * k_panels, kv_panel * v_panels
    places, work_tile_of = barriers.make(config)
    stage_of, phase_of = barriers.ring(stages)
    buffer_of, q_phase_of = barriers.ring(q_buffers)
    tile_place_of, tile_phase_of = barriers.ring(WORK_TILES)
    bias_stage_of, bias_phase_of = barriers.ring(bias_stages)
    Q_FULL, Q_EMPTY, TILE_FULL, _, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL, BIAS_EMPTY = places
    fetch_bias = bias_boxes.make(config, 64).fetch
    maps_address = tma.parameter("numba_flash_wgmma")
    load_4d, load_5d, prefetch_5d = tma.load_4d, tma.load_5d, tma.prefetch_5d
    expect, wait, arrive_if = mbarrier.arrive_expect_tx, mbarrier.wait, mbarrier.arrive_if
    block_index = special.block_index
    publish_tile, following, set_back = query_tiles.make(config)
    walk = tile_walk.make(config)
    has_states, behind = walk.present, walk.behind
    set_up = barriers.starter(config, 1)
    k_ring = Ring(K_FULL, K_EMPTY, k_at, k_bytes, k_panels, 128)
    v_ring = Ring(V_FULL, V_EMPTY, v_at, v_bytes, v_panels, 256)

    @inlined
    def load_q(base, i, h, first_query, b):
        """Loads Q of the i-th query tile."""
        buffer = buffer_of(i)
        full = base + Q_FULL + 8 * buffer
        wait(base + Q_EMPTY + 8 * buffer, q_phase_of(i) ^ 1)
        expect(full, q_bytes)
        for panel in range(k_panels):
            to = base + buffer * q_bytes + panel * q_panel
            load_5d(to, maps_address(), full, panel * 64, 0, first_query, divide(h, group), b)

    @inlined
    def prefetch_q(h, first_query, b):
        """Prefetches Q of a query tile into L2, because shared memory has no room for it yet."""
        for panel in range(k_panels):
            prefetch_5d(maps_address(), panel * 64, 0, first_query, divide(h, group), b)

    @inlined
    def load(ring, base, n, j, h_kv, b):
        """Loads tile j of a head, the block's n-th, of K or of V."""
        stage = stage_of(n)
        full = base + ring.full_at + 8 * stage
        wait(base + ring.empty_at + 8 * stage, phase_of(n) ^ 1)
        expect(full, ring.tile_bytes)
        for panel in range(ring.panels):
            to = base + ring.tiles_at + stage * ring.tile_bytes + panel * kv_panel
            load_4d(to, maps_address() + ring.map_at, full, panel * 64, j * tile_n, h_kv, b)

    @inlined
    def claim(base, i, t, arrays, strides, sizes):
        """Query tile t is the block's i-th: publish it and load its Q. If no tile is left, consumers issue S of the
        first query tile and drop it."""
        b, h, first_query = publish_tile(base, i, t, arrays, strides, sizes)
        if q_buffers == 1:
            prefetch_q(h, first_query, b)
        load_q(base, i, h, first_query, b)

    @inlined
    def schedule(base, counter, arrays, strides, sizes):
        """The scheduler, one thread: hands out query tiles and loads Q, independently of the producer."""
        i = int32(0)  # number of query tiles so far
        t = int64(block_index())
        more = int32(1)
        while more != 0:
            claim(base, i, t, arrays, strides, sizes)
            more = field_of(work_tile_of(base, i) + WORK)
            if more != 0:
                wait(base + ASKED, i & 1)
                t = following(t, counter)
            i = int32(i + 1)
        set_back(counter)

    @inlined
    def produce(base, arrays, strides):
        """The producer, one thread: loads K and V in the order in which the consumers need them."""
        n = int32(0)  # number of K and V tiles so far
        i = int32(0)  # number of query tiles so far
        work_tile = work_tile_of(base, i)
        wait(base + TILE_FULL, 0)
        load(
            k_ring, base, n, int32(field_of(work_tile + STOP) - 1), field_of(work_tile + H_KV), field_of(work_tile + B)
        )
        while field_of(work_tile + WORK) != 0:
            next_tile = work_tile_of(base, int32(i + 1))
            begin, j = field_of(work_tile + BEGIN), int32(field_of(work_tile + STOP) - 1)
            ask_at, behind_j = min(begin + 1, j), j
            if has_states:
                states, alone = field_of(work_tile + STATES), j == begin
            while j >= begin:
                # Ask for the next query tile now: earlier, the block would hold a query tile while others are idle;
                # later, its Q and its first K would arrive too late.
                if has_states:
                    behind_j = behind(states, j, begin, arrays, strides)
                    arrive_if(base + ASKED, alone or behind_j == begin)
                else:
                    arrive_if(base + ASKED, j == ask_at)
                source, next_j = work_tile, int32(behind_j if has_states else j - 1)
                if j == begin:
                    wait(base + TILE_FULL + 8 * tile_place_of(int32(i + 1)), tile_phase_of(int32(i + 1)))
                    source, next_j = next_tile, int32(field_of(next_tile + STOP) - 1)
                # The next K, possibly of the next query tile, comes before this V: this is the order of the products.
                load(k_ring, base, int32(n + 1), next_j, field_of(source + H_KV), field_of(source + B))
                load(v_ring, base, n, j, field_of(work_tile + H_KV), field_of(work_tile + B))
                n = int32(n + 1)
                j = int32(behind_j if has_states else j - 1)
            i = int32(i + 1)
            work_tile = next_tile

    @inlined
    def produce_bias(base, arrays, strides):
        """One thread: loads the bias of each key tile, for one consumer after the other."""
        n = int32(0)  # number of key tiles so far
        i = int32(0)  # number of query tiles so far
        wait(base + TILE_FULL, 0)
        work_tile = work_tile_of(base, i)
        while field_of(work_tile + WORK) != 0:
            begin, j = field_of(work_tile + BEGIN), int32(field_of(work_tile + STOP) - 1)
            b, h, first_query = field_of(work_tile + B), field_of(work_tile + H), field_of(work_tile + FIRST_QUERY)
            states = field_of(work_tile + STATES) if has_states else int32(0)
            while j >= begin:
                for consumer in range(consumers):
                    place = int32(bias_stage_of(n) * consumers + consumer)
                    full = base + BIAS_FULL + 8 * place
                    wait(base + BIAS_EMPTY + 8 * place, bias_phase_of(n) ^ 1)
                    expect(full, bias_bytes)
                    to = base + bias_at + place * bias_bytes
                    fetch_bias(to, full, int32(first_query + 64 * consumer), int32(j * tile_n), h, b, strides)
                n = int32(n + 1)
                j = int32(behind(states, j, begin, arrays, strides) if has_states else j - 1)
            i = int32(i + 1)
            wait(base + TILE_FULL + 8 * tile_place_of(i), tile_phase_of(i))
            work_tile = work_tile_of(base, i)

    return set_up, schedule, produce, produce_bias
