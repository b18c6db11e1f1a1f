"""Loads tiles for the float32 backward on wgmma and splits them into three parts in shared memory (parts.py).

The producer, a whole warpgroup, loads the tiles that a block loops over. The consumers load the block's own tiles. A
block that owns keys loops over the query tiles, for each query head of the group. A block that owns queries loops over
the key tiles. Tiles a have head_dim columns (Q and K), tiles b head_dim_v (dO and V). At `full` mbarriers the producer
reports that a tile is there; at `empty` ones the consumers release it.
"""

from typing import NamedTuple

from numba import int32, int64, uint32

from ...ptx import bar, fence, local, memory
from ..steps.inlined import inlined
from ..steps.named import named
from ..steps.sequence import key_row, query_row
from . import block, parts, pipeline
from .block import BEGIN, FIRST_ROW, H_KV, KEYS, MEMBERS, STOP, H, hand_over, own_thread

LOADED_ROWS = 32  # rows of its own 64 that a consumer splits at a time


class Step(NamedTuple):
    """A step of a block's loop over tiles."""

    n: int  # number of steps before this one
    i: int  # index of the tile
    member: int  # index of the head in its group


def walk(config):
    """-> (steps_of, first_step, step_behind), device functions: the number of tiles that the block loops over, the
    first Step, and the one behind a Step."""
    word = block.words(config.shared_layout().state).read

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

    return steps_of, first_step, step_behind


def sources(config, is_a):
    """-> (source_of, own_source_of), device functions of (base, step, arrays, strides, sizes), the second without step:
    -> (address of the first row of that step's tile a or b, or of the block's own; bytes to the next row; how many of
    its rows exist)."""
    word, sequence_of = block.words(config.shared_layout().state).read, block.sequence_of_work(config)

    @inlined
    def of_queries(sequence, head, first, arrays, strides):
        array, of_array = (arrays.q, strides.q) if is_a else (arrays.do, strides.do)
        row = query_row(of_array, sequence, head, int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(sequence.seqlen_q - first)

    @inlined
    def of_keys(base, sequence, first, arrays, strides):
        array, of_array = (arrays.k, strides.k) if is_a else (arrays.v, strides.v)
        row = key_row(of_array, sequence, word(base, H_KV), int64(first))
        return memory.address(array, row), 4 * of_array[2], int32(word(base, KEYS) - first)

    @inlined
    def source_of(base, step, arrays, strides, sizes):
        first, sequence = int32(step.i * config.stream_rows), sequence_of(base, arrays, strides, sizes)
        if config.of_keys:
            return of_queries(sequence, int32(word(base, H) + step.member), first, arrays, strides)
        return of_keys(base, sequence, first, arrays, strides)

    @inlined
    def own_source_of(base, arrays, strides, sizes):
        first, sequence = word(base, FIRST_ROW), sequence_of(base, arrays, strides, sizes)
        if config.of_keys:
            return of_keys(base, sequence, first, arrays, strides)
        return of_queries(sequence, word(base, H), first, arrays, strides)

    return source_of, own_source_of


def make(config):
    """-> `walk`'s functions; produce, the producer's work; and load_own_a, load_own_b, by which consumer `me`, 0 or 1,
    loads K or Q, and V or dO. Whole warps call them."""
    plan, (ring_a, ring_b) = config.shared_layout(), pipeline.streamed(config)
    steps_of, first_step, step_behind = walk(config)

    def of_tiles(is_a, columns, ring, at, tile_bytes, own_at, own_bytes):
        """-> (uint32 that `load` needs, load, load_own), for tiles a or b."""
        source_of, own_source_of = sources(config, is_a)
        rows, own_rows = config.stream_rows, config.own_rows
        streamed = parts.loader(rows, columns, 64, rows * 128, tile_bytes // config.PARTS)
        own = parts.loader(LOADED_ROWS, columns, 64, own_rows * 128, own_bytes // config.PARTS)

        @inlined
        def load(base, step, raw, two, arrays, strides, sizes):
            source, row_bytes, rows_left = source_of(base, step, arrays, strides, sizes)
            streamed.fetch(raw, source, row_bytes, int64(0), int32(0), rows_left, own_thread())
            ring.producer_acquire(base, step.n)
            streamed.store(raw, int32(base + at + ring.stage(step.n) * tile_bytes), two, own_thread())
            hand_over(ring.full(base, step.n))

        @inlined
        def load_own(base, me, arrays, strides, sizes):
            """Splits the rows of an own tile that exist into parts; writes zeros past them."""
            raw, two = local.array(own.words, uint32), local.array(2, uint32)
            source, row_bytes, rows_left = own_source_of(base, arrays, strides, sizes)
            for first_row in range(0, own_rows, LOADED_ROWS):
                own.fetch(raw, source, row_bytes, int64(0), int32(first_row), rows_left, own_thread())
                own.store(raw, int32(base + own_at + first_row * 128), two, own_thread())
            fence.proxy_async()
            bar.sync(me + 3, 128)

        return streamed.words, load, load_own

    a_words, load_a, load_own_a = of_tiles(
        True, config.head_dim, ring_a, plan.stream_a, config.stream_a_bytes, plan.own_a, config.own_a_bytes
    )
    b_words, load_b, load_own_b = of_tiles(
        False, config.head_dim_v, ring_b, plan.stream_b, config.stream_b_bytes, plan.own_b, config.own_b_bytes
    )
    raw_words = max(a_words, b_words)

    @inlined
    def produce(base, arrays, strides, sizes):
        raw, two = local.array(raw_words, uint32), local.array(2, uint32)
        step, steps = first_step(base), steps_of(base)
        while step.n < steps:
            load_a(base, step, raw, two, arrays, strides, sizes)
            load_b(base, step, raw, two, arrays, strides, sizes)
            step = step_behind(base, step)

    return named(steps_of, first_step, step_behind, produce, load_own_a=load_own_a, load_own_b=load_own_b)
