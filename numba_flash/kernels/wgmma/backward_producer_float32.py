"""Loads tiles for the float32 backward on wgmma and splits them into three parts in shared memory (parts.py).

The producer, a whole warpgroup, loads the tiles that a block loops over. The consumers load the block's own tiles. A
block that owns keys loops over the query tiles, for each query head of the group. A block that owns queries loops over
the key tiles. A block of a pair (paired_tiles.py) loads only its half of the columns, and panel by panel: a panel takes
the place of the other kind of tile's panel of the step before.
"""

from numba import int32, int64, uint32

from ...ptx import bar, cluster, fence, local, memory
from ..steps.basics import inlined, named
from ..steps.sequence import key_row, query_row
from . import backward_work, block, parts
from .block import FIRST_ROW, H_KV, KEYS, H, hand_over, own_thread

LOADED_ROWS = 32  # rows of its own 64 that a consumer splits at a time


def source(config, is_a, of_keys):
    """-> source_of(base, member, first, arrays, strides, sizes), a device function: where the rows of K or V, or of Q
    or dO, from `first` on are. -> (address of the first row, bytes to the next one, how many exist). member: index of a
    query head in its group."""
    word, sequence_of = block.state_of(config).read, block.sequence_of_work(config)

    @inlined
    def queries(base, member, first, arrays, strides, sizes):
        array, of_array = (arrays.q, strides.q) if is_a else (arrays.do, strides.do)
        sequence = sequence_of(base, arrays, strides, sizes)
        row = query_row(of_array, sequence, int32(word(base, H) + member), int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(sequence.seqlen_q - first)

    @inlined
    def keys(base, member, first, arrays, strides, sizes):
        array, of_array = (arrays.k, strides.k) if is_a else (arrays.v, strides.v)
        sequence = sequence_of(base, arrays, strides, sizes)
        row = key_row(of_array, sequence, word(base, H_KV), int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(word(base, KEYS) - first)

    return keys if of_keys else queries


def of_panel(rows, head_dim, half, panel, part_bytes):
    """-> as parts.loader for one panel of 64 columns of a block of a pair.

    head_dim: of the whole tile; half: columns of the first block. The second block may have fewer, or none; missing
    ones are zeros.
    """
    first, second = (min(max(columns - 64 * panel, 0), 64) for columns in (min(half, head_dim), head_dim - half))
    of_first = parts.loader(rows, first or 64, 64, 0, part_bytes)
    of_second = parts.loader(rows, second or 64, 64, 0, part_bytes)
    has_first, has_second, same, step = int(first > 0), int(second > 0), first == second, 4 * half

    @inlined
    def fetch(raw, source, row_bytes, head_bytes, first_row, rows_left, thread):
        rank = cluster.rank()
        place = source + int64(rank * step + 256 * panel)
        if same or rank == 0:
            of_first.fetch(raw, place, row_bytes, head_bytes, first_row, int32(rows_left * has_first), thread)
        else:
            of_second.fetch(raw, place, row_bytes, head_bytes, first_row, int32(rows_left * has_second), thread)

    return named(fetch, words=of_first.words, store=of_first.store)


def make(config, tiles):
    """-> device functions: produce, the producer's work; and load_own_a, load_own_b, by which consumer `me`, 0 or 1,
    loads K or Q, and V or dO. Whole warps call them. tiles: of backward_tiles_float32.py."""
    plan, word, walk = config.shared_layout(), block.state_of(config).read, backward_work.query_walk(config, True)

    def of_tiles(is_a, head_dim, padded, place, own_at):
        of_step, of_own = source(config, is_a, not config.of_keys), source(config, is_a, config.of_keys)
        rows, own_rows, panels = config.other_rows, config.own_rows, -(-padded // 64)
        own_part, two_panels = own_rows * 128 * panels, config.paired and panels > 1
        if config.paired:  # one panel of all rows after the other; the parts of a streamed panel lie together
            first, second = (of_panel(rows, head_dim, padded, panel, rows * 128) for panel in range(2))
            own, own_second = (of_panel(own_rows, head_dim, padded, panel, own_part) for panel in range(2))
        else:
            second = own_second = None
            first = parts.loader(rows, head_dim, 64, rows * 128, rows * 128 * panels)
            own = parts.loader(LOADED_ROWS, head_dim, 64, own_rows * 128, own_part)

        @inlined
        def load(base, step, arrays, strides, sizes):
            raw, second_raw = local.array(first.words, uint32), local.array(first.words, uint32)
            n, two, zero = step.n, local.array(2, uint32), int32(0)
            from_row, row_bytes, rows_left = of_step(base, step.member, int32(step.i * rows), arrays, strides, sizes)
            first.fetch(raw, from_row, row_bytes, int64(0), zero, rows_left, own_thread())
            if two_panels:
                second.fetch(second_raw, from_row, row_bytes, int64(0), zero, rows_left, own_thread())
            place.acquire(base, n)
            first.store(raw, place.at(base, n), two, own_thread())
            hand_over(place.ring.full(base, n))
            if two_panels:
                place.acquire(base + 8, n)
                second.store(second_raw, int32(place.at(base, n) + config.panel_bytes), two, own_thread())
                hand_over(place.ring.full(base + 8, n))

        @inlined
        def load_own(base, me, arrays, strides, sizes):
            """Splits the rows of an own tile that exist into parts; writes zeros past them."""
            raw, two, zero = local.array(own.words, uint32), local.array(2, uint32), int32(0)
            from_row, row_bytes, rows_left = of_own(base, zero, word(base, FIRST_ROW), arrays, strides, sizes)
            if config.paired:
                own.fetch(raw, from_row, row_bytes, int64(0), zero, rows_left, own_thread())
                own.store(raw, int32(base + own_at), two, own_thread())
                if two_panels:
                    own_second.fetch(raw, from_row, row_bytes, int64(0), zero, rows_left, own_thread())
                    own_second.store(raw, int32(base + own_at + own_rows * 128), two, own_thread())
            else:
                for row in range(0, own_rows, LOADED_ROWS):
                    own.fetch(raw, from_row, row_bytes, int64(0), int32(row), rows_left, own_thread())
                    own.store(raw, int32(base + own_at + row * 128), two, own_thread())
            fence.proxy_async()
            bar.sync(me + 3, 128)

        return load, load_own

    place_a, place_b = tiles.places
    load_a, load_own_a = of_tiles(True, config.head_dim, config.head_dim_padded, place_a, plan.own_a)
    load_b, load_own_b = of_tiles(False, config.head_dim_v, config.head_dim_v_padded, place_b, plan.own_b)

    @inlined
    def produce(base, arrays, strides, sizes):
        step, steps = walk.first_step(base, arrays, strides), walk.steps(base)
        while step.n < steps:
            load_a(base, step, arrays, strides, sizes)
            load_b(base, step, arrays, strides, sizes)
            step = walk.next_step(base, step, arrays, strides)

    return named(produce, load_own_a=load_own_a, load_own_b=load_own_b)
