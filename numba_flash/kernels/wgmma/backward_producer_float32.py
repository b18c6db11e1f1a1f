"""Loads tiles for the float32 backward on wgmma and splits them into three parts in shared memory (parts.py).

The producer, a whole warpgroup, loads the tiles that a block loops over. The consumers load the block's own tiles. A
block that owns keys loops over the query tiles, for each query head of the group. A block that owns queries loops over
the key tiles. Tiles a have head_dim columns (Q and K), tiles b head_dim_v (dO and V). At `full` mbarriers the producer
reports that a tile is there; at `empty` ones the consumers release it.
"""

from typing import NamedTuple

from numba import int32, int64, uint32

from ...ptx import bar, fence, local, memory
from ..steps.basics import inlined, named
from ..steps.sequence import key_row, query_row
from . import block, parts, pipeline
from .block import BEGIN, FIRST_ROW, H_KV, KEYS, MEMBERS, STOP, H, hand_over, own_thread

LOADED_ROWS = 32  # rows of its own 64 that a consumer splits at a time


class Step(NamedTuple):
    """A step of a block's loop over tiles."""

    n: int  # number of steps before this one
    i: int  # index of the tile
    member: int  # index of the head in its group


def sources(config, is_a):
    """-> (of_step, of_own), device functions of (base, member, first, arrays, strides, sizes): where the rows of a tile
    a or b from `first` on are, of one that the block loops over or of its own. -> (address of the first row, bytes to
    the next one, how many exist). member: index of a query head in its group."""
    word, sequence_of = block.state_of(config).read, block.sequence_of_work(config)

    @inlined
    def of_queries(base, member, first, arrays, strides, sizes):
        array, of_array = (arrays.q, strides.q) if is_a else (arrays.do, strides.do)
        sequence = sequence_of(base, arrays, strides, sizes)
        row = query_row(of_array, sequence, int32(word(base, H) + member), int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(sequence.seqlen_q - first)

    @inlined
    def of_keys(base, member, first, arrays, strides, sizes):
        array, of_array = (arrays.k, strides.k) if is_a else (arrays.v, strides.v)
        sequence = sequence_of(base, arrays, strides, sizes)
        row = key_row(of_array, sequence, word(base, H_KV), int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(word(base, KEYS) - first)

    return (of_queries, of_keys) if config.of_keys else (of_keys, of_queries)


def of_loads(config, a, b):
    """-> device functions: steps_of(base), the number of tiles that the block loops over; the first Step, and the one
    behind a Step; produce, the producer's work; and load_own_a, load_own_b, by which consumer `me`, 0 or 1, loads K or
    Q, and V or dO. Whole warps call them. a, b: (load, load_own) for tiles of that kind."""
    (load_a, load_own_a), (load_b, load_own_b), word = a, b, block.state_of(config).read

    @inlined
    def steps_of(base):
        return int32(word(base, MEMBERS) * (word(base, STOP) - word(base, BEGIN)))

    @inlined
    def first_step(base):
        return Step(int32(0), int32(word(base, STOP) - 1), int32(0))

    @inlined
    def step_behind(base, step):
        """All tiles of a member come first, the last of them first."""
        i, member = int32(step.i - 1), step.member
        if i < word(base, BEGIN):
            i, member = int32(word(base, STOP) - 1), int32(member + 1)
        return Step(int32(step.n + 1), i, member)

    @inlined
    def produce(base, arrays, strides, sizes):
        step, steps = first_step(base), steps_of(base)
        while step.n < steps:
            load_a(base, step, arrays, strides, sizes)
            load_b(base, step, arrays, strides, sizes)
            step = step_behind(base, step)

    return named(steps_of, first_step, step_behind, produce, load_own_a=load_own_a, load_own_b=load_own_b)


def make(config):
    """-> as of_loads."""
    plan, (ring_a, ring_b) = config.shared_layout(), pipeline.streamed(config)
    word = block.state_of(config).read

    def of_tiles(is_a, columns, ring, at, own_at, tile_bytes, own_bytes):
        of_step, of_own = sources(config, is_a)
        rows, own_rows = config.other_rows, config.own_rows
        streamed = parts.loader(rows, columns, 64, rows * 128, tile_bytes // config.PARTS)
        own = parts.loader(LOADED_ROWS, columns, 64, own_rows * 128, own_bytes // config.PARTS)

        @inlined
        def load(base, step, arrays, strides, sizes):
            raw, two = local.array(streamed.words, uint32), local.array(2, uint32)
            first = int32(step.i * rows)
            source, row_bytes, rows_left = of_step(base, step.member, first, arrays, strides, sizes)
            streamed.fetch(raw, source, row_bytes, int64(0), int32(0), rows_left, own_thread())
            ring.producer_acquire(base, step.n)
            streamed.store(raw, int32(base + at + ring.stage(step.n) * tile_bytes), two, own_thread())
            hand_over(ring.full(base, step.n))

        @inlined
        def load_own(base, me, arrays, strides, sizes):
            """Splits the rows of an own tile that exist into parts; writes zeros past them."""
            raw, two = local.array(own.words, uint32), local.array(2, uint32)
            first = word(base, FIRST_ROW)
            source, row_bytes, rows_left = of_own(base, int32(0), first, arrays, strides, sizes)
            for first_row in range(0, own_rows, LOADED_ROWS):
                own.fetch(raw, source, row_bytes, int64(0), int32(first_row), rows_left, own_thread())
                own.store(raw, int32(base + own_at + first_row * 128), two, own_thread())
            fence.proxy_async()
            bar.sync(me + 3, 128)

        return load, load_own

    a_bytes, b_bytes = (config.stream_a_bytes, config.own_a_bytes), (config.stream_b_bytes, config.own_b_bytes)
    a = of_tiles(True, config.head_dim, ring_a, plan.stream_a, plan.own_a, *a_bytes)
    b = of_tiles(False, config.head_dim_v, ring_b, plan.stream_b, plan.own_b, *b_bytes)
    return of_loads(config, a, b)
