"""Loads tiles for the float32 backward on wgmma and splits them into three parts in shared memory (parts.py).

The producer, a whole warpgroup, loads the tiles that a block loops over. The consumers load the block's own tiles. A
block that owns keys loops over the query tiles, for each query head of the group. A block that owns queries loops over
the key tiles. Tiles a have head_dim columns (Q and K), tiles b head_dim_v (dO and V). At `full` mbarriers the producer
reports that a tile is there; at `empty` ones the consumers release it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, int64, uint32

from ...ptx import bar, fence, local, mbarrier, memory, special
from ..steps.inlined import inlined
from ..steps.sequence import key_row, query_row
from ..steps.sequence import make as make_sequence
from . import backward_state, parts
from .backward_state import BATCH, BEGIN, FIRST_ROW, HEAD, HEAD_KV, KEYS, MEMBERS, STOP

LOADED_ROWS = 32  # rows of its own 64 that a consumer splits at a time


class Step(NamedTuple):
    """A step of a block's loop over tiles."""

    n: int  # number of steps before this one
    i: int  # index of the tile
    member: int  # index of the head in its group


class Producer(NamedTuple):
    """Device functions. Those of the loop are called by whole warps."""

    steps_of: Callable[..., Any]  # (base) -> number of tiles that the block loops over
    first_step: Callable[..., Any]  # (base) -> Step
    step_behind: Callable[..., Any]  # (base, step) -> Step
    produce: Callable[..., Any]  # (base, arrays, strides, sizes): the producer's work
    load_own_a: Callable[..., Any]  # (base, me, arrays, strides, sizes): K or Q by consumer me, 0 or 1
    load_own_b: Callable[..., Any]  # likewise, V or dO


@inlined
def elected():
    """Whether this lane acts for its warp."""
    return special.thread_index() & int32(31) == 0


@inlined
def own_thread():
    """Thread index in its warpgroup."""
    return special.thread_index() & int32(127)


@inlined
def hand_over(full):
    """Makes what the warp wrote visible to wgmma, and reports it at `full`."""
    fence.proxy_async()
    bar.warp_sync()
    mbarrier.arrive_if(full, elected())


def walk(config):
    """-> (steps_of, first_step, step_behind), as in Producer."""
    _, _, word, _ = backward_state.words(config)

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


def sources(config):
    """-> (source_of, own_source_of), device functions -> (address of a tile's first row, how many of its rows exist).

    The tile is that of a step of the loop, (base, step, array, of_array, arrays, strides, sizes), or the block's own,
    without a step.
    """
    _, _, word, _ = backward_state.words(config)
    sequence_of = make_sequence(config)

    @inlined
    def source_of(base, step, array, of_array, arrays, strides, sizes):
        first, sequence = int32(step.i * config.stream_rows), sequence_of(word(base, BATCH), arrays, strides, sizes)
        if config.of_keys:
            row = query_row(of_array, sequence, int32(word(base, HEAD) + step.member), int64(first))
            rows_left = int32(sequence.seqlen_q - first)
        else:
            row = key_row(of_array, sequence, word(base, HEAD_KV), int64(first))
            rows_left = int32(word(base, KEYS) - first)
        return memory.address(array, row), rows_left

    @inlined
    def own_source_of(base, array, of_array, arrays, strides, sizes):
        first, sequence = word(base, FIRST_ROW), sequence_of(word(base, BATCH), arrays, strides, sizes)
        if config.of_keys:
            row, rows_left = key_row(of_array, sequence, word(base, HEAD_KV), int64(first)), word(base, KEYS) - first
        else:
            row, rows_left = query_row(of_array, sequence, word(base, HEAD), int64(first)), sequence.seqlen_q - first
        return memory.address(array, row), int32(rows_left)

    return source_of, own_source_of


def make(config):
    of_keys, rows, own_rows = config.of_keys, config.stream_rows, config.own_rows
    plan, (ring_a, ring_b) = config.shared_layout(), backward_state.streamed(config)
    a_bytes, b_bytes = config.stream_a_bytes, config.stream_b_bytes
    own_a_part, own_b_part = config.own_a_bytes // config.PARTS, config.own_b_bytes // config.PARTS
    a_words, fetch_a, store_a = parts.loader(rows, config.head_dim, 64, rows * 128, a_bytes // config.PARTS)
    b_words, fetch_b, store_b = parts.loader(rows, config.head_dim_v, 64, rows * 128, b_bytes // config.PARTS)
    own_a_words, fetch_own_a, store_own_a = parts.loader(LOADED_ROWS, config.head_dim, 64, own_rows * 128, own_a_part)
    own_b_words, fetch_own_b, store_own_b = parts.loader(LOADED_ROWS, config.head_dim_v, 64, own_rows * 128, own_b_part)
    raw_words = max(a_words, b_words)
    (steps_of, first_step, step_behind), (source_of, own_source_of) = walk(config), sources(config)

    @inlined
    def produce(base, arrays, strides, sizes):
        raw = local.array(raw_words, uint32)
        two = local.array(2, uint32)
        array_a, of_a = (arrays.q, strides.q) if of_keys else (arrays.k, strides.k)
        array_b, of_b = (arrays.do, strides.do) if of_keys else (arrays.v, strides.v)
        step, steps = first_step(base), steps_of(base)
        while step.n < steps:
            source, rows_left = source_of(base, step, array_a, of_a, arrays, strides, sizes)
            fetch_a(raw, source, 4 * of_a[2], int64(0), int32(0), rows_left, own_thread())
            ring_a.producer_acquire(base, step.n)
            store_a(raw, int32(base + plan.stream_a + ring_a.stage(step.n) * a_bytes), two, own_thread())
            hand_over(ring_a.full(base, step.n))
            source, rows_left = source_of(base, step, array_b, of_b, arrays, strides, sizes)
            fetch_b(raw, source, 4 * of_b[2], int64(0), int32(0), rows_left, own_thread())
            ring_b.producer_acquire(base, step.n)
            store_b(raw, int32(base + plan.stream_b + ring_b.stage(step.n) * b_bytes), two, own_thread())
            hand_over(ring_b.full(base, step.n))
            step = step_behind(base, step)

    @inlined
    def load_own(base, me, raw, fetch_rows, store_rows, target, array, of_array, arrays, strides, sizes):
        """Splits the rows of an own tile that exist into parts; writes zeros past them."""
        two = local.array(2, uint32)
        source, rows_left = own_source_of(base, array, of_array, arrays, strides, sizes)
        for first_row in range(0, own_rows, LOADED_ROWS):
            fetch_rows(raw, source, 4 * of_array[2], int64(0), int32(first_row), rows_left, own_thread())
            store_rows(raw, int32(target + first_row * 128), two, own_thread())
        fence.proxy_async()
        bar.sync(me + 3, 128)

    @inlined
    def load_own_a(base, me, arrays, strides, sizes):
        raw = local.array(own_a_words, uint32)
        array, of_array = (arrays.k, strides.k) if of_keys else (arrays.q, strides.q)
        load_own(
            base, me, raw, fetch_own_a, store_own_a, int32(base + plan.own_a), array, of_array, arrays, strides, sizes
        )

    @inlined
    def load_own_b(base, me, arrays, strides, sizes):
        raw = local.array(own_b_words, uint32)
        array, of_array = (arrays.v, strides.v) if of_keys else (arrays.do, strides.do)
        load_own(
            base, me, raw, fetch_own_b, store_own_b, int32(base + plan.own_b), array, of_array, arrays, strides, sizes
        )

    return Producer(steps_of, first_step, step_behind, produce, load_own_a, load_own_b)
