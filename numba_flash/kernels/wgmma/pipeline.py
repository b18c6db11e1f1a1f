"""A ring of places in shared memory, with the mbarriers at which a producer and its consumers take turns; and the rings
of the forward's and of the backward's blocks.

A place has two mbarriers: `full`, at which consumers wait until the n-th tile is there, and `empty`, at which the
producer waits until all consumers have released the tile before it. The n-th tile is in place n % stages, and
(n // stages) & 1 is the parity of the phase in which that place is filled. A place that was never used counts as empty,
because the producer waits for the parity before. Where mbarriers are is in bytes from the block's base in shared
memory, 8 bytes each.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, uint32

from ...ptx import mbarrier
from ..steps.inlined import inlined
from .block import BYTES

WORK_TILES = 4  # the scheduler of a forward writes them; a block has a ring of four


class Pipeline(NamedTuple):
    """Device functions. base: the block's shared memory; n: the number of a tile since the block began."""

    stage: Callable[..., Any]  # (n) -> the place of the n-th tile
    full: Callable[..., Any]  # (base, n) -> its mbarrier, which counts what comes by TMA
    empty: Callable[..., Any]  # (base, n) -> the other one
    init: Callable[..., Any]  # (base, fillers, readers), by one thread: how many arrivals fill and empty a place
    producer_acquire: Callable[..., Any]  # (base, n): wait until the place is empty
    producer_expect: Callable[..., Any]  # (base, n, count) -> `full`: likewise; then `count` bytes are to come by TMA
    producer_commit: Callable[..., Any]  # (base, n, condition): a thread says that its part of the tile is there
    consumer_wait: Callable[..., Any]  # (base, n): wait until the tile is there
    consumer_release: Callable[..., Any]  # (base, n, condition): a thread says that its warp is done with the tile


@functools.cache
def pipeline(full_at: int, empty_at: int | None, stages: int = 1, stride: int = 8) -> Pipeline:
    """full_at, empty_at: where the mbarriers of the first place are, in bytes from the base; stride: from there to the
    next place's. empty_at is None if nobody has to wait until a place is empty."""
    has_empty = empty_at is not None

    @inlined
    def stage(n):
        return int32(uint32(n) % uint32(stages))

    @inlined
    def phase(n):
        return int32(uint32(n) // uint32(stages)) & 1

    @inlined
    def full(base, n):
        return int32(base + full_at + stride * stage(n))

    @inlined
    def empty(base, n):
        return int32(base + empty_at + stride * stage(n))

    @inlined
    def init(base, fillers, readers):
        for n in range(stages):
            mbarrier.init(base + full_at + stride * n, fillers)
            if has_empty:
                mbarrier.init(base + empty_at + stride * n, readers)

    @inlined
    def producer_acquire(base, n):
        mbarrier.wait(empty(base, n), phase(n) ^ 1)

    @inlined
    def producer_expect(base, n, count):
        producer_acquire(base, n)
        mbarrier.arrive_expect_tx(full(base, n), count)
        return full(base, n)

    @inlined
    def producer_commit(base, n, condition):
        mbarrier.arrive_if(full(base, n), condition)

    @inlined
    def consumer_wait(base, n):
        mbarrier.wait(full(base, n), phase(n))

    @inlined
    def consumer_release(base, n, condition):
        mbarrier.arrive_if(empty(base, n), condition)

    return Pipeline(
        stage, full, empty, init, producer_acquire, producer_expect, producer_commit, consumer_wait, consumer_release
    )


class ForwardRings(NamedTuple):
    """bias has one place for each consumer and stage: that of consumer c is at base + 8 * c."""

    q: Pipeline
    tiles: Pipeline  # work tiles, from the scheduler to all other roles
    k: Pipeline
    v: Pipeline
    bias: Pipeline
    asked: Pipeline  # the scheduler waits here until the producer asks for the next query tile
    work_tile: Callable[..., Any]  # (base, i) -> where the work tile of the block's i-th query tile is


@functools.cache
def of_forward(config) -> ForwardRings:
    """Q's full and empty mbarriers twice, those of work tiles, the one of the scheduler, and then those of K and V for
    each stage, the work tiles, and those of a bias."""
    at = config.shared_layout().barriers
    q_full, q_empty, tile_full, tile_empty, asked = at, at + 16, at + 32, at + 64, at + 96
    k_full, v_full, k_empty, v_empty, work_tiles_at = (at + 112 + 8 * config.stages * i for i in range(5))
    bias_full = work_tiles_at + BYTES * WORK_TILES
    bias_empty = bias_full + 8 * config.bias_stages * config.consumers
    tiles = pipeline(tile_full, tile_empty, WORK_TILES)

    @inlined
    def work_tile(base, i):
        return base + work_tiles_at + BYTES * tiles.stage(i)

    return ForwardRings(
        pipeline(q_full, q_empty, config.q_buffers),
        tiles,
        pipeline(k_full, k_empty, config.stages),
        pipeline(v_full, v_empty, config.stages),
        pipeline(bias_full, bias_empty, max(config.bias_stages, 1), 8 * config.consumers),
        pipeline(asked, None),
        work_tile,
    )


def starter_of_forward(config, fillers):
    """-> set_up(base), a device function: one thread initialises the mbarriers, before a fence and a barrier. fillers:
    number of arrivals that fill K or V."""
    rings, consumers = of_forward(config), config.consumers
    bias_consumers = consumers if config.bias_stages else 0

    @inlined
    def set_up(base):
        rings.asked.init(base, 1, 0)
        rings.q.init(base, 1, 4 * consumers)
        rings.tiles.init(base, 1, 4 * consumers)
        rings.k.init(base, fillers, 4 * consumers)
        rings.v.init(base, fillers, 4 * consumers)
        for consumer in range(bias_consumers):
            rings.bias.init(base + 8 * consumer, 1, 128)

    return set_up


class BackwardRings(NamedTuple):
    """dq has one place for each consumer and stage: that of consumer c is at base + 8 * c."""

    own: Pipeline  # the tile that the block owns
    state: Pipeline  # the words that describe its work
    a: Pipeline  # tiles that it walks over
    b: Pipeline
    ds: Pipeline
    dq: Pipeline  # parts of dQ


def streamed(config) -> tuple[Pipeline, Pipeline]:
    """The pipelines of the tiles a and b that a block of a backward walks over."""
    at = config.barriers()
    return pipeline(at.a_full, at.a_empty, config.stages_a), pipeline(at.b_full, at.b_empty, config.stages_b)


@functools.cache
def of_backward(config) -> BackwardRings:
    at = config.barriers()
    return BackwardRings(
        pipeline(at.own_full, at.own_empty),
        pipeline(at.state_full, at.state_empty, config.states),
        *streamed(config),
        pipeline(at.ds_full, None),
        pipeline(at.dq_full, at.dq_empty, max(config.dq_stages, 1), 8 * config.consumers),
    )


def starter_of_backward(config):
    """-> set_up(base), as above."""
    rings = of_backward(config)
    consumers, consumer_warps, has_dq = config.consumers, 4 * config.consumers, config.dq_stages > 0
    # Arrivals that release a state: the consumers, the thread that loads dO, and those that add dQ.
    stays, exchanges = config.stays, config.ds_bytes > 0
    state_readers = 32 * consumer_warps + 1 + (consumers if has_dq else 0)
    beside = config.lse_delta_bytes or config.bias_boxes  # what threads read of a tile themselves, apart from wgmma
    a_readers = 32 * consumer_warps if beside else consumer_warps

    @inlined
    def set_up(base):
        if stays:
            rings.own.init(base, 1, consumer_warps)
            rings.state.init(base, 1, state_readers)
        else:
            mbarrier.init(rings.own.full(base, 0), 1)
        rings.a.init(base, 1, a_readers)
        rings.b.init(base, 1, consumer_warps)
        if exchanges:
            rings.ds.init(base, 128 * consumers, 0)
        if has_dq:
            for consumer in range(consumers):
                rings.dq.init(base + 8 * consumer, 128, 1)

    return set_up
