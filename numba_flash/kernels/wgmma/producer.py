"""The threads that supply the consumers of a wgmma block: the scheduler (query tiles and Q), the producer (K and V),
and a third one for a bias that TMA loads.

Each role is one thread. Of packed sequences a warp is the scheduler, the third thread loads Q, and another warp writes
rows of no sequence. TMA loads the tiles. At `full` mbarriers consumers wait for a tile, at `empty` ones they
release it.

The kernel is persistent: one block per multiprocessor stays for the whole launch and takes query tiles by a counter in
global memory. Tiles that see the most keys come first, and blocks work on a few heads at a time, so that K and V of
these heads stay in L2. A work tile describes a query tile to all roles of the block.
"""

import functools

from numba import int32, int64, uint32

from ...arrays.dtypes import ITEM_SIZE
from ...config.forward import L2_BYTES
from ...ptx import bar, bits, memory, shfl, special, tma, vote
from ..score import longest_first, reads, tile_walk, user
from ..steps import outside_rows
from ..steps.basics import TRUE, divide, inlined, named, tiles_of
from ..steps.head_rounds import bias_of_entries, entry_and_head, in_rounds
from ..steps.sequence import key_range, make as make_sequence
from . import bias_boxes, block, packed_tiles, pipeline
from .block import BEGIN, CUT, FIRST_ROW, FREE, MEMBERS, STATES, STOP, B, H, word_alone, write

SHORT = 2  # key tiles


@functools.cache
def query_tiles(config):
    """-> device functions for one thread, the scheduler. t: a query tile's number in the launch; i: its number in the
    block."""
    tile_n, group, queries = config.tile_n, config.group_size, config.queries
    l2_rows = L2_BYTES // (ITEM_SIZE[config.dtype] * (config.head_dim + config.head_dim_v))  # of K and V
    rings = pipeline.of_forward(config)
    sequence_of = make_sequence(config)
    has_mask, ranges_of, walk = config.has("mask"), reads.make(config, 1).ranges, tile_walk.make(config)
    asked_of_whole = group == 1 and user.present(config)  # as fragment_functions.py does
    take, bias_of_all = longest_first.make(config).take, bias_of_entries(config)
    packed, parts = config.packed, config.parts

    @inlined
    def heads_at_once(keys, most, sizes):
        """Heads of query tiles whose K and V stay in L2."""
        kv_heads = max(divide(l2_rows, max(keys, 1)), 1)
        return int32(min(kv_heads * divide(sizes.heads, sizes.heads_kv * group), most))

    @inlined
    def tile_of(base, i, t, arrays, strides, sizes):
        """-> (b, h, first_query) of query tile t (b = batch: none), the block's i-th.

        Some heads at a time, last queries first; under a mask_mod, those that see the most tiles first.
        """
        if walk.present:
            b, head, own = take(t, arrays, strides, sizes)
            return b, int32(head * group), int32(own * queries)
        m_tiles = tiles_of(sizes.seqlen_q, queries)
        groups = divide(sizes.heads, group)
        head_tiles = int32(sizes.batch) * groups
        at_once = heads_at_once(sizes.seqlen_k, head_tiles, sizes)
        head_tile, from_last = in_rounds(t, m_tiles, head_tiles, at_once)
        b, of_entry = entry_and_head(head_tile, sizes.batch, groups, bias_of_all(strides))
        b = b if t < head_tiles * m_tiles else int32(sizes.batch)
        return b, int32(of_entry * group), int32((m_tiles - 1 - from_last) * queries)

    find_tile = packed_tiles.make(config, heads_at_once, rings.work_tile) if packed else tile_of

    @inlined
    def whole_tiles(sizes):
        """The last tile number that may begin in K and V; the next one is past the end for every sequence."""
        return divide(int32(sizes.total_k if packed else sizes.seqlen_k), tile_n)

    @inlined
    def key_tiles_of(sequence, first_query, sizes):
        """-> (begin, free, cut, stop): the key tiles that the query tile sees, as in ranges.key_tiles.

        If it sees none, the result is one tile past the end, which reads as zeros: so every query tile has a key tile.
        If some rows do not exist, no tile counts as seen by all rows: functions are not called for missing rows.
        """
        last_query = first_query + min(sequence.seqlen_q - first_query, queries) - 1
        begin, free, cut, stop = key_range(sequence, first_query, last_query, sizes, tile_n)
        if stop <= begin:
            begin = free = cut = whole_tiles(sizes) + 1
            stop = begin + 1
        if asked_of_whole and sequence.seqlen_q - first_query < queries:
            cut = begin
        return int32(begin), int32(free), int32(cut), int32(stop)

    @inlined
    def own_part(part, begin, free, cut, stop, sizes):
        """-> one part of a query tile's key tiles. An empty part becomes a tile past the end, as in key_tiles_of."""
        most = tiles_of(stop - begin, parts)
        first = int32(begin + most * part)
        last = min(int32(first + most), stop)
        if last <= first:
            first = whole_tiles(sizes) + 1
            last = first + 1
        return first, max(free, first), min(cut, last), last

    @inlined
    def write_ends(work_tile, begin, stop, sizes):
        if stop <= begin:  # as in key_tiles_of
            begin = whole_tiles(sizes) + 1
            stop = begin + 1
        write(work_tile, BEGIN, begin)
        write(work_tile, FREE, max(word_alone(work_tile, FREE), begin))
        write(work_tile, STOP, stop)

    @inlined
    def ask_mask(work_tile, arrays, strides, sizes):
        """Drops the tiles before the first and after the last in which the mask leaves a key. FREE and CUT <- the tiles
        between in which neither the mask nor positions hide a key.

        Reads the work tile and writes it again, because the scheduler has few registers.
        """
        b, h, first_query = word_alone(work_tile, B), word_alone(work_tile, H), word_alone(work_tile, FIRST_ROW)
        end_query = min(int32(sizes.seqlen_q), int32(first_query + queries))
        first, end, whole_first, whole_end = ranges_of(b, h, group, first_query, end_query, arrays, strides, sizes)
        free, cut = tiles_of(whole_first, tile_n), divide(whole_end, tile_n)
        write(work_tile, FREE, max(word_alone(work_tile, FREE), free))
        write(work_tile, CUT, min(word_alone(work_tile, CUT), cut))
        begin = max(word_alone(work_tile, BEGIN), divide(first, tile_n))
        stop = min(word_alone(work_tile, STOP), tiles_of(end, tile_n))
        write_ends(work_tile, begin, stop, sizes)

    @inlined
    def leave_empty_out(work_tile, arrays, strides, sizes):
        """Drops the tiles at both ends in which a mask_mod leaves nothing; STATES <- where the states of the tiles
        between are."""
        b, h, first_query = word_alone(work_tile, B), word_alone(work_tile, H), word_alone(work_tile, FIRST_ROW)
        states = walk.row(b, h, first_query, arrays, strides)
        begin, stop = word_alone(work_tile, BEGIN), word_alone(work_tile, STOP)
        begin, stop = walk.trim(states, begin, stop, arrays, strides)
        write_ends(work_tile, begin, stop, sizes)
        write(work_tile, STATES, states)

    @inlined
    def work_tile_of(base, i, t, arrays, strides, sizes):
        """-> the WorkTile of query tile t, the block's i-th; with config.parts of the t-th part of all of them. If no
        tile is left, the first one replaces it, without members, so that roles need no branch."""
        part = int32(0)
        if parts > 1:
            part, t = int32(int32(t) & int32(parts - 1)), divide(t, parts)
        b, h, first_query = find_tile(base, i, t, arrays, strides, sizes)
        work = b < sizes.batch
        if not work:
            b, h, first_query = int32(0), int32(0), int32(0)
        sequence = sequence_of(b, arrays, strides, sizes)
        begin, free, cut, stop = key_tiles_of(sequence, first_query, sizes)
        if parts > 1:
            begin, free, cut, stop = own_part(part, begin, free, cut, stop, sizes)
        h_kv, position = divide(h, divide(sizes.heads, sizes.heads_kv)), first_query + sequence.q_start
        members = work
        if packed:
            members = int32(min(sequence.seqlen_q - first_query, queries)) if work else int32(0)
        return block.WorkTile(b, h, h_kv, first_query, sequence.keys, position, members, begin, free, cut, stop)

    @inlined
    def acts():
        """Whether the thread is the scheduler. With packed sequences it is one of a warp, which looks for tiles."""
        return special.thread_index() & int32(31) == 0 if packed else TRUE

    @inlined
    def publish(base, i, t, arrays, strides, sizes):
        """Tells the producer and the consumers that query tile t is the block's i-th. -> where its Q is"""
        tile, work = work_tile_of(base, i, t, arrays, strides, sizes), rings.work_tile(base, i)
        if packed:  # at once: behind the wait it would be read again, which takes registers that the scheduler lacks
            sequence = sequence_of(tile.b, arrays, strides, sizes)
        rings.tiles.producer_acquire(base, i)
        if acts():
            block.write_tile(work, tile)
            if parts > 1:
                write(work, block.PART, t)
            if packed:
                write(work, block.Q_ROW, tile.first_row + sequence.first_query)
                write(work, block.FIRST_KEY, sequence.first_key)
            if has_mask:
                write(work, block.POS_FREE, tile.free)
                write(work, block.POS_CUT, tile.cut)
                ask_mask(work, arrays, strides, sizes)
            if walk.present:
                leave_empty_out(work, arrays, strides, sizes)
            rings.tiles.producer_commit(base, i, True)
        if packed:
            bar.warp_sync()  # all lanes read the tile
        if has_mask or walk.present:  # read again, not kept in registers until here
            return word_alone(work, B), word_alone(work, H), word_alone(work, FIRST_ROW)
        return tile.b, tile.h, tile.first_row

    @inlined
    def following(t, counter):
        """The block's next query tile after t."""
        if packed:
            taken = uint32(0)
            if acts():
                taken = memory.add(counter, uint32(1))
            return int32(shfl.idx_b32(taken, 0)) + special.block_count()
        return int32(memory.add(counter, uint32(1))) + special.block_count()

    @inlined
    def reset(counter):
        """Called by each block that found no tile left; the last one resets the counter for the next launch."""
        if acts() and memory.add(counter + 4, uint32(1)) == uint32(special.block_count() - 1):
            memory.exchange(counter, uint32(0))
            memory.exchange(counter + 4, uint32(0))

    return named(work_tile_of, publish, following, reset)


def make(config):
    """-> device functions: set_up(base), which initialises the mbarriers, and one thread's whole work each."""
    plan = config.shared_layout()
    q_panel, kv_panel = config.tile_m * 128, config.tile_n * 128  # bytes of 64 columns
    q_panels = -(-config.head_dim_padded // 64)
    q_bytes = q_panel * q_panels
    rings = pipeline.of_forward(config)
    fetch_bias = bias_boxes.make(config, 64).fetch
    maps_address = tma.parameter("numba_flash_wgmma")
    work, start = query_tiles(config), pipeline.starter_of_forward(config, 1)
    walk, packed = tile_walk.make(config), config.packed
    written = (("o", config.head_dim_v), *[("lse", 1)] * config.write_lse)
    outside = outside_rows.make(config, written, 32) if packed else None

    @inlined
    def load_q(base, i, h, first_row, entry):
        """Loads Q of the i-th query tile."""
        full = rings.q.producer_expect(base, i, q_bytes)
        for panel in range(q_panels):
            to = base + rings.q.stage(i) * q_bytes + panel * q_panel
            tma.load_5d(to, maps_address(), full, panel * 64, 0, first_row, divide(h, config.group_size), entry)

    def loader(ring, at, columns, map_at):
        panels = -(-columns // 64)
        tile_bytes = kv_panel * panels

        @inlined
        def load(base, n, j, work_tile):
            """Loads tile j for a query tile, the block's n-th, of K or of V."""
            h_kv, entry, first_key = word_alone(work_tile, block.H_KV), word_alone(work_tile, B), int32(0)
            if packed:
                entry, first_key = int32(0), word_alone(work_tile, block.FIRST_KEY)
            full = ring.producer_expect(base, n, tile_bytes)
            for panel in range(panels):
                to = base + at + ring.stage(n) * tile_bytes + panel * kv_panel
                first_row = int32(first_key + j * config.tile_n)
                tma.load_4d(to, maps_address() + map_at, full, panel * 64, first_row, h_kv, entry)

        return load

    # The last: where the tensor map is among the kernel's.
    load_k = loader(rings.k, plan.k, config.head_dim_padded, 128)
    load_v = loader(rings.v, plan.v, config.head_dim_v_padded, 256)

    @inlined
    def schedule(base, counter, arrays, strides, sizes):
        """The scheduler, one thread: hands out query tiles and loads Q, independently of the producer. Of packed
        sequences a warp, while another thread loads Q."""
        i = int32(0)  # number of query tiles so far
        t = int64(special.block_index())
        more = int32(1)
        while more != 0:
            # If no tile is left, consumers issue S of the first query tile and drop it.
            entry, h, first_row = work.publish(base, i, t, arrays, strides, sizes)
            if not packed:
                load_q(base, i, h, first_row, entry)
            more = word_alone(rings.work_tile(base, i), MEMBERS)
            if more != 0:
                if packed:
                    # Looking for a tile takes long. If this one is short, the block looks one tile further ahead.
                    work_tile = rings.work_tile(base, i)
                    short = word_alone(work_tile, STOP) - word_alone(work_tile, BEGIN) <= SHORT
                    before = int32(i - 1) if short else i
                    if before >= 0:
                        rings.asked.consumer_wait(base, before)
                else:
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
        load_k(base, n, int32(word_alone(work_tile, STOP) - 1), work_tile)
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
                # In the order of the products: the next K before this V, but behind it if it is the next query tile's.
                if j == begin:
                    load_v(base, n, j, work_tile)
                    rings.tiles.consumer_wait(base, int32(i + 1))
                    load_k(base, int32(n + 1), int32(word_alone(next_tile, STOP) - 1), next_tile)
                else:
                    load_k(base, int32(n + 1), int32(behind_j if walk.present else j - 1), work_tile)
                    load_v(base, n, j, work_tile)
                n = int32(n + 1)
                j = int32(behind_j if walk.present else j - 1)
            i = int32(i + 1)
            work_tile = next_tile

    @inlined
    def produce_q(base):
        """One thread: loads Q of packed sequences, while the scheduler looks for the tiles behind."""
        i, more = int32(0), int32(1)
        while more != 0:
            rings.tiles.consumer_wait(base, i)
            work_tile = rings.work_tile(base, i)
            more = word_alone(work_tile, MEMBERS)
            load_q(base, i, word_alone(work_tile, H), word_alone(work_tile, block.Q_ROW), int32(0))
            i = int32(i + 1)

    @inlined
    def clear_outside(arrays, strides, sizes):
        """A warp clears rows of no packed sequence. A lane looks at one gap between sequences. Blocks share a gap."""
        for first in range(int32(0), int32(sizes.batch + 1), int32(32)):
            begin, end = outside.gap(int32(first + (special.thread_index() & int32(31))), arrays, strides, sizes)
            left = vote.ballot(uint32(1) if begin < end else uint32(0))
            while left != 0:
                source = bits.highest(left)
                left = uint32(left ^ (uint32(1) << uint32(source)))
                row = int32(shfl.idx_b32(uint32(begin), source)) + special.block_index()
                last = int32(shfl.idx_b32(uint32(end), source))
                while row < last:
                    outside.clear(row, special.thread_index() & int32(31), arrays, strides, sizes)
                    row = int32(row + special.block_count())

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
                j = int32(walk.next_tile(states, j, begin, arrays, strides))
            i = int32(i + 1)
            rings.tiles.consumer_wait(base, i)
            work_tile = rings.work_tile(base, i)

    @inlined
    def set_up(base):
        """One thread sets up the block, before a barrier."""
        for number in range(config.tensor_maps):
            tma.prefetch(maps_address() + 128 * number)
        start(base)

    return named(schedule, produce, produce_q, clear_outside, produce_bias, set_up)
