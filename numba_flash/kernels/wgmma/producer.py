"""Who supplies the consumers of a wgmma block: the scheduler, with query tiles and Q, and the producer, with K and V;
and another one, with a bias that comes by TMA.

Each is one thread. Tiles come by TMA; the consumers are told at mbarriers, and give places back at others.
"""

from numba import int32, int64, uint32

from ...ptx import cluster, ld_st, mbarrier, memory, special, tma
from ..score import longest_first, positions, reads, tile_walk
from ..steps.head_rounds import bias_of_entries, entry_and_head, in_rounds
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import key_tiles, row_keys
from . import barriers, bias_boxes
from .barriers import (
    BEGIN,
    CUT,
    FIRST_QUERY,
    FREE,
    H_KV,
    KEYS,
    POS_HIGH,
    POS_LOW,
    STATES,
    STOP,
    WORK,
    WORK_TILES,
    B,
    H,
)


def make(config):
    """-> (set_up, schedule, produce, produce_bias), device functions: the mbarriers, and the roles."""
    tile_m, tile_n, consumers = config.tile_m, config.tile_n, config.consumers
    stages, q_buffers = config.stages, config.q_buffers
    group, queries, blocks = config.group_size, config.queries, config.cluster
    cluster_queries, part_rows = queries * blocks, tile_n // blocks  # rows of a tile that a block fetches
    _, k_at, v_at, bias_at, *_ = config.shared_offsets()
    bias_bytes, bias_places, bias_stages = config.bias_bytes, config.bias_stages * consumers, max(config.bias_stages, 1)
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes of 64 columns
    k_panels, v_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    q_bytes, k_bytes, v_bytes = q_panel * k_panels, kv_panel * k_panels, kv_panel * v_panels
    l2_rows = config.l2_bytes // (2 * (config.head_dim + config.head_dim_v))  # of K and V
    places, work_tile_of = barriers.make(config)
    stage_of, phase_of = barriers.ring(stages)
    buffer_of, q_phase_of = barriers.ring(q_buffers)
    tile_place_of, tile_phase_of = barriers.ring(WORK_TILES)
    bias_stage_of, bias_phase_of = barriers.ring(bias_stages)
    Q_FULL, Q_EMPTY, TILE_FULL, TILE_EMPTY, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL, BIAS_EMPTY = places
    fetch_bias = bias_boxes.make(config, 64).fetch
    maps_address = tma.parameter("numba_flash_wgmma")
    load_4d, load_5d, multicast_4d, prefetch_5d = tma.load_4d, tma.load_5d, tma.multicast_4d, tma.prefetch_5d
    init, expect, wait = mbarrier.init, mbarrier.arrive_expect_tx, mbarrier.wait
    arrive, arrive_if = mbarrier.arrive, mbarrier.arrive_if
    block_index, block_count = special.block_index, special.block_count
    load_shared, store_shared = ld_st.load_b32, ld_st.store_b32
    atomic_add, exchange = memory.add, memory.exchange
    rank = cluster.rank
    keys_and_start = positions.make(config)
    has_mask, ends_of, walk = config.has("mask"), reads.make(config, 1).ends, tile_walk.make(config)
    has_states, states_row, states_ends, behind = walk.present, walk.row, walk.ends, walk.behind
    take, bias_of_all = longest_first.make(config).take, bias_of_entries(config)

    @inlined
    def set_up(base):
        """The mbarriers, by one thread, before a fence and a barrier."""
        for i in range(2):
            init(base + Q_FULL + 8 * i, 1)
            init(base + Q_EMPTY + 8 * i, 4 * consumers)
        init(base + ASKED, 1)
        for i in range(WORK_TILES):
            init(base + TILE_FULL + 8 * i, 1)
            init(base + TILE_EMPTY + 8 * i, 4 * consumers)
        for stage in range(stages):
            init(base + K_FULL + 8 * stage, 1)
            init(base + V_FULL + 8 * stage, 1)
            init(base + K_EMPTY + 8 * stage, 4 * consumers * blocks)
            init(base + V_EMPTY + 8 * stage, 4 * consumers * blocks)
        for place in range(bias_places):
            init(base + BIAS_FULL + 8 * place, 1)
            init(base + BIAS_EMPTY + 8 * place, 128)

    @inlined
    def tile_of(t, arrays, strides, sizes):
        """-> (b, h, first_query) of query tile t, or of a cluster's t-th tiles (b = batch: none).

        Some heads at a time, last queries first, or under a mask_mod those that see the most tiles.
        """
        if has_states:
            b, head, own = take(t, arrays, strides, sizes)
            return b, int32(head * group), int32(own * queries)
        m_tiles = divide(int32(sizes.seqlen_q) + int32(cluster_queries - 1), cluster_queries)
        groups = divide(sizes.heads, group)
        head_tiles = int32(sizes.batch) * groups
        kv_heads_at_once = max(divide(l2_rows, max(sizes.seqlen_k, 1)), 1)
        heads_at_once = int32(min(kv_heads_at_once * divide(sizes.heads, sizes.heads_kv * group), head_tiles))
        head_tile, from_last = in_rounds(t, m_tiles, head_tiles, heads_at_once)
        b, of_entry = entry_and_head(head_tile, sizes.batch, groups, bias_of_all(strides))
        b = b if t < head_tiles * m_tiles else int32(sizes.batch)
        return b, int32(of_entry * group), int32((m_tiles - 1 - from_last) * cluster_queries)

    @inlined
    def tiles_of(first_query, tile_pos, keys, sizes):
        """-> (begin, free, cut, stop): the key tiles that the query tile sees, as in ranges.key_tiles.

        Where it sees none, one past the end of K and V, which reads as zeros: so every query tile has keys to walk.
        """
        last_pos = tile_pos + min(sizes.seqlen_q - first_query, queries) - 1
        top_first, top_end = row_keys(tile_pos, sizes.left, sizes.right, keys)
        bottom_first, bottom_end = row_keys(last_pos, sizes.left, sizes.right, keys)
        begin, free, cut, stop = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        if stop <= begin:
            begin = free = cut = divide(int32(sizes.seqlen_k), tile_n) + 1
            stop = begin + 1
        return int32(begin), int32(free), int32(cut), int32(stop)

    @inlined
    def load_q(base, i, h, first_query, b):
        """Q of the i-th query tile."""
        buffer = buffer_of(i)
        full = base + Q_FULL + 8 * buffer
        wait(base + Q_EMPTY + 8 * buffer, q_phase_of(i) ^ 1)
        expect(full, q_bytes)
        for panel in range(k_panels):
            to = base + buffer * q_bytes + panel * q_panel
            load_5d(to, maps_address(), full, panel * 64, 0, first_query, divide(h, group), b)

    @inlined
    def prefetch_q(h, first_query, b):
        """Q of a query tile as far as L2, because there is no room for it yet."""
        for panel in range(k_panels):
            prefetch_5d(maps_address(), panel * 64, 0, first_query, divide(h, group), b)

    def ring_loader(full_at, empty_at, tiles_at, tile_bytes, panels, map_at):
        """-> load, for the ring of K's or V's tiles; map_at: where its tensor map is among the kernel's."""

        @inlined
        def load(base, n, j, h_kv, b):
            """Tile j of a head, the n-th that the block fetches."""
            stage = stage_of(n)
            full = base + full_at + 8 * stage
            wait(base + empty_at + 8 * stage, phase_of(n) ^ 1)
            expect(full, tile_bytes)
            for panel in range(panels):
                to = base + tiles_at + stage * tile_bytes + panel * kv_panel
                if blocks > 1:  # a part of the rows, for all blocks of the cluster; these fetch the others
                    row = rank() * part_rows
                    every = (1 << blocks) - 1
                    multicast_4d(
                        to + row * 128, maps_address() + map_at, full, panel * 64, j * tile_n + row, h_kv, b, every
                    )
                else:
                    load_4d(to, maps_address() + map_at, full, panel * 64, j * tile_n, h_kv, b)

        return load

    load_k = ring_loader(K_FULL, K_EMPTY, k_at, k_bytes, k_panels, 128)
    load_v = ring_loader(V_FULL, V_EMPTY, v_at, v_bytes, v_panels, 256)

    @inlined
    def field_of(place):
        """A word of a work tile, for one thread."""
        return int32(load_shared(int32(place)))

    @inlined
    def write_ends(work_tile, begin, stop, sizes):
        if stop <= begin:  # as in tiles_of
            begin = divide(int32(sizes.seqlen_k), tile_n) + 1
            stop = begin + 1
        store_shared(work_tile + BEGIN, uint32(begin))
        store_shared(work_tile + FREE, uint32(max(field_of(work_tile + FREE), begin)))
        store_shared(work_tile + STOP, uint32(stop))

    @inlined
    def leave_hidden_out(work_tile, arrays, strides, sizes):
        """Without the tiles in which the mask shows nothing, before the first key that it shows and behind the last.

        Reads the work tile and writes it again, because the scheduler has few registers."""
        b, h, first_query = field_of(work_tile + B), field_of(work_tile + H), field_of(work_tile + FIRST_QUERY)
        end_query = min(int32(sizes.seqlen_q), int32(first_query + queries))
        first, end = ends_of(b, h, group, first_query, end_query, arrays, strides, sizes)
        begin = max(field_of(work_tile + BEGIN), divide(first, tile_n))
        stop = min(field_of(work_tile + STOP), divide(end + int32(tile_n - 1), tile_n))
        write_ends(work_tile, begin, stop, sizes)

    @inlined
    def leave_empty_out(work_tile, arrays, strides, sizes):
        """Without the tiles at its ends in which a mask_mod shows nothing; STATES <- what says which are between."""
        b, h, first_query = field_of(work_tile + B), field_of(work_tile + H), field_of(work_tile + FIRST_QUERY)
        states = states_row(b, h, first_query, arrays, strides)
        begin, stop = field_of(work_tile + BEGIN), field_of(work_tile + STOP)
        begin, stop = states_ends(states, begin, stop, arrays, strides)
        write_ends(work_tile, begin, stop, sizes)
        store_shared(work_tile + STATES, uint32(states))

    @inlined
    def publish(base, i, work, b, h, h_kv, first_query, keys, tile_pos, begin, free, cut, stop, arrays, strides, sizes):
        """To the producer and the consumers."""
        at = work_tile_of(base, i)
        wait(base + TILE_EMPTY + 8 * tile_place_of(i), tile_phase_of(i) ^ 1)
        store_shared(at + WORK, uint32(work))
        store_shared(at + B, uint32(b))
        store_shared(at + H, uint32(h))
        store_shared(at + H_KV, uint32(h_kv))
        store_shared(at + FIRST_QUERY, uint32(first_query))
        store_shared(at + KEYS, uint32(keys))
        store_shared(at + BEGIN, uint32(begin))
        store_shared(at + FREE, uint32(free))
        store_shared(at + CUT, uint32(cut))
        store_shared(at + STOP, uint32(stop))
        store_shared(at + POS_LOW, uint32(tile_pos & int64(0xFFFFFFFF)))
        store_shared(at + POS_HIGH, uint32((tile_pos >> int64(32)) & int64(0xFFFFFFFF)))
        if has_mask:
            leave_hidden_out(at, arrays, strides, sizes)
        if has_states:
            leave_empty_out(at, arrays, strides, sizes)
        arrive(base + TILE_FULL + 8 * tile_place_of(i))

    @inlined
    def claim(base, i, t, arrays, strides, sizes):
        """Query tile t is the block's i-th: publish it and fetch its Q.

        Where there is none, the first one of all stands for it: consumers issue its S and drop it, so that they need no
        branch.
        """
        b, h, first_query = tile_of(t, arrays, strides, sizes)
        work = b < sizes.batch
        if not work:
            b, h, first_query = int32(0), int32(0), int32(0)
        if blocks > 1:
            first_query = int32(first_query + rank() * queries)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        tile_pos = first_query + q_start
        begin, free, cut, stop = tiles_of(first_query, tile_pos, keys, sizes)
        h_kv = divide(h, divide(sizes.heads, sizes.heads_kv))
        publish(base, i, work, b, h, h_kv, first_query, keys, tile_pos, begin, free, cut, stop, arrays, strides, sizes)
        if has_mask or has_states:  # not kept in registers until here
            work_tile = work_tile_of(base, i)
            b, h, first_query = field_of(work_tile + B), field_of(work_tile + H), field_of(work_tile + FIRST_QUERY)
        if q_buffers == 1:
            prefetch_q(h, first_query, b)
        load_q(base, i, h, first_query, b)

    @inlined
    def schedule(base, counter, arrays, strides, sizes):
        """The scheduler's one thread: hand out the query tiles and fetch Q, while the producer goes on with K and V."""
        i = int32(0)  # query tiles so far
        t = int64(block_index())
        if blocks > 1:
            t = int64(divide(block_index(), blocks))
        more = int32(1)
        while more != 0:
            claim(base, i, t, arrays, strides, sizes)
            more = field_of(work_tile_of(base, i) + WORK)
            if more != 0:
                wait(base + ASKED, i & 1)
                if blocks > 1:  # its blocks must take the same, and all tiles take as long: so no counter is asked
                    t = t + divide(block_count(), blocks)
                else:
                    t = int32(atomic_add(counter, uint32(1))) + block_count()
            i = int32(i + 1)
        if blocks == 1:
            if atomic_add(counter + 4, uint32(1)) == uint32(block_count() - 1):  # the last one sets all back
                exchange(counter, uint32(0))
                exchange(counter + 4, uint32(0))

    @inlined
    def produce(base, arrays, strides):
        """The producer's one thread: fetch K and V as the consumers will need them."""
        n = int32(0)  # tiles of K and V so far
        i = int32(0)  # query tiles so far
        work_tile = work_tile_of(base, i)
        wait(base + TILE_FULL, 0)
        load_k(base, n, int32(field_of(work_tile + STOP) - 1), field_of(work_tile + H_KV), field_of(work_tile + B))
        while field_of(work_tile + WORK) != 0:
            following = work_tile_of(base, i + 1)
            begin, j = field_of(work_tile + BEGIN), int32(field_of(work_tile + STOP) - 1)
            ask_at, behind_j = min(begin + 1, j), j
            if has_states:
                states, alone = field_of(work_tile + STATES), j == begin
            while j >= begin:
                # Not sooner, or the block sits on a query tile while others are idle; not later, because its Q and its
                # first K take a while.
                if has_states:
                    behind_j = behind(states, j, begin, arrays, strides)
                    arrive_if(base + ASKED, alone or behind_j == begin)
                else:
                    arrive_if(base + ASKED, j == ask_at)
                source, next_j = work_tile, int32(behind_j if has_states else j - 1)
                if j == begin:
                    wait(base + TILE_FULL + 8 * tile_place_of(i + 1), tile_phase_of(i + 1))
                    source, next_j = following, int32(field_of(following + STOP) - 1)
                # The next K, if need be of the next query tile, before this V: in the order of the products.
                load_k(base, int32(n + 1), next_j, field_of(source + H_KV), field_of(source + B))
                load_v(base, n, j, field_of(work_tile + H_KV), field_of(work_tile + B))
                n = int32(n + 1)
                j = int32(behind_j if has_states else j - 1)
            i = int32(i + 1)
            work_tile = following

    @inlined
    def produce_bias(base, arrays, strides):
        """One thread: of each tile of keys the bias, for one consumer after the other."""
        n = int32(0)  # tiles of keys so far
        i = int32(0)  # query tiles so far
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
