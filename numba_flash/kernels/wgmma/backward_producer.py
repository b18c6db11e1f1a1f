"""The producer of a wgmma backward block: threads that load tiles by TMA in the order in which consumers need them.

`full` mbarriers tell the consumers that a tile has arrived. At `empty` ones the consumers release it.

One thread loads the block's own tiles once, and then tile after tile Q with its lse, -delta and bias, or K with its
bias. The other loads dO or V. They are in two warps, so that neither waits for the other.
"""

from numba import int32

from ...ptx import griddepcontrol, mbarrier, memory, tma
from ..score import tile_walk
from ..steps import lse_delta
from ..steps.basics import divide, inlined, named
from . import backward_work, bias_boxes, block, pipeline
from .block import BEGIN, FIRST_ROW, H_KV, QUERIES, STATES, STOP, B, H

Q_MAP, K_MAP, V_MAP, DO_MAP = 0, 128, 256, 384  # the kernel's tensor maps, bytes from the first


def loaders(config):
    """-> device functions of one thread: load_own, of the tiles that the block owns; load_a and load_b, of the n-th
    tile a, Q or K, and of the n-th b, dO or V."""
    plan, rings = config.shared_layout(), pipeline.of_backward(config)
    maps_address = tma.parameter(f"numba_flash_{config.kernel}")
    maps = ((K_MAP, V_MAP), (Q_MAP, DO_MAP)) if config.of_keys else ((Q_MAP, DO_MAP), (K_MAP, V_MAP))
    a_panels, b_panels = -(-config.head_dim_padded // 64), -(-config.head_dim_v_padded // 64)
    has_own_b = config.of_ds  # dV alone needs no V
    own_bytes, tile_rows = config.own_rows * 128 * (a_panels + b_panels * has_own_b), config.other_rows

    def box_loader(rows, panels, map_at):
        @inlined
        def load(to, full, row, head, batch):
            """Loads a tile of `rows` rows that begins at `row`; rows that do not exist become zeros."""
            for panel in range(panels):
                tma.load_4d(to + panel * (rows * 128), maps_address() + map_at, full, panel * 64, row, head, batch)

        return load

    (load_own_a, load_own_b), (load_stream_a, load_stream_b) = (
        (box_loader(rows, a_panels, map_of_a), box_loader(rows, b_panels, map_of_b))
        for rows, (map_of_a, map_of_b) in zip((config.own_rows, tile_rows), maps, strict=True)
    )

    @inlined
    def load_own(base, row, head, batch):
        full = rings.own.full(base, 0)
        mbarrier.arrive_expect_tx(full, own_bytes)
        load_own_a(base + plan.own_a, full, row, head, batch)
        if has_own_b:
            load_own_b(base + plan.own_b, full, row, head, batch)

    @inlined
    def load_a(base, n, row, head, batch, extra_bytes):
        """extra_bytes: what the caller loads on the same mbarrier. -> the tile's stage."""
        stage = rings.a.stage(n)
        full = rings.a.producer_expect(base, n, int32(config.stream_a_bytes + extra_bytes))
        load_stream_a(base + plan.stream_a + stage * config.stream_a_bytes, full, row, head, batch)
        return stage

    @inlined
    def load_b(base, n, row, head, batch, extra_bytes):
        """-> the tile's mbarrier"""
        full = rings.b.producer_expect(base, n, int32(config.stream_b_bytes + extra_bytes))
        load_stream_b(base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes, full, row, head, batch)
        return full

    return load_own, load_a, load_b


def of_keys(config):
    """-> device functions for one thread. work: where the words of the block's key tile are; n: the number of tiles of
    Q, or of dO, loaded before; w: the number of the key tile among those of the block."""
    plan, rings = config.shared_layout(), pipeline.of_backward(config)
    word = block.state_of(config).read_alone
    fetch_bias = bias_boxes.make(config, config.tile_m, of_keys=True).fetch
    load_own, load_a, load_b = loaders(config)
    walk, tile_blocks = backward_work.query_walk(config, whole_warp=False), config.tile_m // 16
    places, packed = block.places(config), config.packed
    queries_of = block.sequence_of_work(config, whole_warp=False, queries=True)

    @inlined
    def load_keys(base, work):
        """Loads K and V."""
        load_own(base, places.key_row(work, word(work, FIRST_ROW)), word(work, H_KV), places.entry(work))

    @inlined
    def load_beside_q(base, work, i, h, n, count, arrays, strides, sizes):
        """Loads lse, -delta and bias of query tile i into the stage of its Q, which is the n-th."""
        sequence = queries_of(work, arrays, strides, sizes)
        stage, full = rings.a.stage(n), rings.a.full(base, n)
        source = memory.address(arrays.lse_delta, lse_delta.row_block(sequence, h, i * tile_blocks, sizes))
        tma.load_bytes(base + plan.lse_delta + stage * config.lse_delta_bytes, source, full, count)
        if config.bias_bytes:
            to = base + plan.bias + stage * config.bias_bytes
            fetch_bias(to, full, int32(i * config.tile_m), word(work, FIRST_ROW), h, sequence.b, strides)

    @inlined
    def load_q(base, work, n, w, arrays, strides, sizes):
        """From the second key tile on, a Q is loaded before K and V, because consumers release K and V last."""
        waits = config.stays and w > 0
        if not (waits or config.keys_first):
            load_keys(base, work)
        i, member = walk.first(work, arrays, strides)
        while walk.more(work, i, member):
            h = int32(word(work, H) + member)
            # masks hide what lies past the last block
            queries = word(work, QUERIES) if packed else sizes.seqlen_q
            blocks_left = int32(lse_delta.row_blocks(queries) - i * tile_blocks)
            count = int32(min(blocks_left, int32(tile_blocks)) * int32(4 * lse_delta.BLOCK_WORDS))
            row = places.query_row(work, int32(i * config.tile_m))
            load_a(base, n, row, h, places.entry(work), int32(count + config.bias_bytes))
            if n == 0:
                griddepcontrol.wait()  # it writes lse and delta
            load_beside_q(base, work, i, h, n, count, arrays, strides, sizes)
            if waits:
                rings.own.producer_acquire(base, w)
                load_keys(base, work)
                waits = False
            n = int32(n + 1)
            i, member = walk.next(work, i, member, arrays, strides)
        if waits:
            rings.own.producer_acquire(base, w)
            load_keys(base, work)
        return n

    @inlined
    def load_no_q(base, n, sizes):
        """After the last Q loads one past the end, zeros: its S is issued and dropped, so that consumers need no
        branch."""
        rows = sizes.total_q if packed else sizes.seqlen_q
        load_a(base, n, int32((divide(int32(rows), config.tile_m) + 1) * config.tile_m), 0, 0, 0)

    @inlined
    def load_do(base, work, n, arrays, strides):
        i, member = walk.first(work, arrays, strides)
        while walk.more(work, i, member):
            row = places.query_row(work, int32(i * config.tile_m))
            h = int32(word(work, H) + member)
            full = load_b(base, n, row, h, places.entry(work), config.ds_bytes if config.bias_in_ds else 0)
            if config.bias_in_ds:  # consumers have released b when dQ of the tile two before it has read dS there
                to = base + plan.ds + (n & 1) * config.ds_bytes
                fetch_bias(to, full, int32(i * config.tile_m), word(work, FIRST_ROW), h, word(work, B), strides)
            n = int32(n + 1)
            i, member = walk.next(work, i, member, arrays, strides)
        return n

    @inlined
    def produce_a(base, arrays, strides, sizes):
        """Loads K and V, and Q, of a block with one key tile."""
        n = load_q(base, base, int32(0), int32(0), arrays, strides, sizes)
        load_no_q(base, n, sizes)

    @inlined
    def produce_b(base, arrays, strides):
        """Loads dO of such a block."""
        load_do(base, base, int32(0), arrays, strides)

    return named(load_own, load_q, load_no_q, load_do, produce_a, produce_b)


def of_queries(config):
    """-> device functions for one thread each, of a block that owns queries."""
    plan, tile_n, rings = config.shared_layout(), config.tile_n, pipeline.of_backward(config)
    word, walk = block.state_of(config).read_alone, tile_walk.make(config)
    places, packed, fetch_bias = block.places(config), config.packed, bias_boxes.make(config, config.tile_m).fetch
    load_own, load_a, load_b = loaders(config)

    @inlined
    def next_tile(base, j, arrays, strides):
        """The key tile after j."""
        if walk.present:
            states, begin = word(base, STATES), word(base, BEGIN)
            return int32(walk.next_tile(states, j, begin, arrays, strides))
        return int32(j - 1)

    @inlined
    def produce_a(base, arrays, strides, sizes):
        """Loads Q and dO, then K with its bias, tile after tile. After the last tile it loads a K past the end, as
        load_no_q does."""
        load_own(base, places.query_row(base, word(base, FIRST_ROW)), word(base, H), places.entry(base))
        n, j = int32(0), int32(word(base, STOP) - 1)
        while j >= word(base, BEGIN):
            first_key, b = int32(j * tile_n), word(base, B)
            row, entry = places.key_row(base, first_key), int32(0) if packed else b
            stage = load_a(base, n, row, word(base, H_KV), entry, config.bias_bytes)
            if config.bias_boxes:
                to, full = base + plan.bias + stage * config.bias_bytes, rings.a.full(base, n)
                fetch_bias(to, full, word(base, FIRST_ROW), first_key, word(base, H), b, strides)
            n, j = int32(n + 1), next_tile(base, j, arrays, strides)
        rows = sizes.total_k if packed else sizes.seqlen_k
        load_a(base, n, int32((divide(int32(rows), tile_n) + 1) * tile_n), 0, 0, 0)

    @inlined
    def produce_b(base, arrays, strides):
        """Loads V, tile after tile."""
        n, j = int32(0), int32(word(base, STOP) - 1)
        while j >= word(base, BEGIN):
            load_b(base, n, places.key_row(base, int32(j * tile_n)), word(base, H_KV), places.entry(base), 0)
            n, j = int32(n + 1), next_tile(base, j, arrays, strides)

    return named(produce_a, produce_b)
