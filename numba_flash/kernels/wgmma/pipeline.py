"""A ring of places in shared memory, with the mbarriers at which a producer and its consumers take turns; and the rings
of the forward's and of the backward's blocks.

A place has two mbarriers: `full`, at which consumers wait until the n-th tile is there, and `empty`, at which the
producer waits until all consumers have released the tile before it. The n-th tile is in place n % stages, and
(n // stages) & 1 is the parity of the phase in which that place is filled. A place that was never used counts as empty,
because the producer waits for the parity before. Where mbarriers are is in bytes from the block's base in shared
memory, 8 bytes each.
"""

import functools

from numba import int32, uint32

from ...ptx import fence, mbarrier
from ..steps.basics import inlined, named
from .block import BYTES

WORK_TILES = 4  # the scheduler of a forward writes them; a block has a ring of four


@functools.cache
def pipeline(full_at, empty_at, stages=1, stride=8):
    """-> device functions. base: the block's shared memory; n: the number of a tile since the block began.

    full_at, empty_at: where the mbarriers of the first place are, in bytes from the base; stride: from there to the
    next place's. empty_at is None if nobody has to wait until a place is empty.
    """
    has_empty = empty_at is not None

    @inlined
    def stage(n):
        """The place of the n-th tile."""
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
        """One thread sets how many arrivals fill and empty a place."""
        for n in range(stages):
            mbarrier.init(base + full_at + stride * n, fillers)
            if has_empty:
                mbarrier.init(base + empty_at + stride * n, readers)

    @inlined
    def producer_acquire(base, n):
        """Waits until the place is empty."""
        mbarrier.wait(empty(base, n), phase(n) ^ 1)

    @inlined
    def producer_expect(base, n, count):
        """Likewise; then `count` bytes are to come by TMA. -> `full`"""
        producer_acquire(base, n)
        mbarrier.arrive_expect_tx(full(base, n), count)
        return full(base, n)

    @inlined
    def producer_commit(base, n, condition):
        """A thread says that its part of the tile is there."""
        mbarrier.arrive_if(full(base, n), condition)

    @inlined
    def consumer_wait(base, n):
        """Waits until the tile is there."""
        mbarrier.wait(full(base, n), phase(n))

    @inlined
    def consumer_release(base, n, condition):
        """A thread says that its warp is done with the tile."""
        mbarrier.arrive_if(empty(base, n), condition)

    of_producer, of_consumer = (producer_acquire, producer_expect, producer_commit), (consumer_wait, consumer_release)
    return named(stage, full, empty, init, *of_producer, *of_consumer)


@functools.cache
def of_forward(config):
    """-> pipelines, and work_tile(base, i): where the work tile of the block's i-th query tile is.

    Q's full and empty mbarriers come twice, then those of work tiles, those of the scheduler, those of K and V for
    each stage, the work tiles, and those of a bias.
    """
    at, consumers = config.shared_layout().barriers, config.consumers
    k_full, v_full, k_empty, v_empty, work_tiles_at = (at + 112 + 8 * config.stages * i for i in range(5))
    bias_full = work_tiles_at + BYTES * WORK_TILES
    bias_empty = bias_full + 8 * config.bias_stages * consumers
    tiles = pipeline(at + 32, at + 64, WORK_TILES)

    @inlined
    def work_tile(base, i):
        return base + work_tiles_at + BYTES * tiles.stage(i)

    return named(
        work_tile,
        q=pipeline(at, at + 16, config.q_buffers),
        tiles=tiles,  # work tiles, from the scheduler to all other roles
        # The scheduler waits here until the producer asks for the next query tile, or it is one tile ahead of this.
        asked=pipeline(at + 96, None, 2 if config.packed else 1),
        k=pipeline(k_full, k_empty, config.stages),
        v=pipeline(v_full, v_empty, config.stages),
        # One place for each consumer and stage: that of consumer c is at base + 8 * c.
        bias=pipeline(bias_full, bias_empty, max(config.bias_stages, 1), 8 * consumers),
    )


def starter_of_forward(config, fillers):
    """-> set_up(base), a device function: one thread initialises the mbarriers, before a barrier. fillers: number of
    arrivals that fill K or V."""
    rings, consumers = of_forward(config), config.consumers

    @inlined
    def set_up(base):
        rings.asked.init(base, 1, 0)
        rings.q.init(base, 1, 4 * consumers)
        rings.tiles.init(base, 1, 4 * consumers)
        rings.k.init(base, fillers, 4 * consumers)
        rings.v.init(base, fillers, 4 * consumers)
        if config.bias_stages:
            for consumer in range(consumers):
                rings.bias.init(base + 8 * consumer, 1, 128)
        fence.mbarrier_init()

    return set_up


def streamed(config):
    """-> the pipelines of the tiles a and b that a block of a backward walks over."""
    at = config.barriers()
    return pipeline(at.a_full, at.a_empty, config.stages_a), pipeline(at.b_full, at.b_empty, config.stages_b)


@functools.cache
def of_backward(config):
    at, (a, b) = config.barriers(), streamed(config)
    return named(
        own=pipeline(at.own_full, at.own_empty),  # the tile that the block owns
        state=pipeline(at.state_full, at.state_empty, config.states),  # the words that describe its work
        a=a,
        b=b,
        ds=pipeline(at.ds_full, None),
        # Parts of dQ, with one place for each consumer and stage, as of a bias in the forward.
        dq=pipeline(at.dq_full, at.dq_empty, max(config.dq_stages, 1), 8 * config.consumers),
    )


def starter_of_backward(config):
    """-> set_up(base), as above."""
    rings, consumers, consumer_warps = of_backward(config), config.consumers, 4 * config.consumers
    # Arrivals that release a state: the consumers, the thread that loads dO, and those that add dQ.
    state_readers = 32 * consumer_warps + 1 + (consumers if config.dq_stages else 0)
    a_readers = 32 * consumer_warps if read_by_lanes(config) else consumer_warps

    @inlined
    def set_up(base):
        if config.stays:
            rings.own.init(base, 1, consumer_warps)
            rings.state.init(base, 1, state_readers)
        else:
            mbarrier.init(rings.own.full(base, 0), 1)
        rings.a.init(base, 1, a_readers)
        rings.b.init(base, 1, consumer_warps)
        if config.ds_bytes:
            rings.ds.init(base, 128 * consumers, 0)
        if config.dq_stages:
            for consumer in range(consumers):
                rings.dq.init(base + 8 * consumer, 128, 1)
        fence.mbarrier_init()

    return set_up


def read_by_lanes(config):
    """Whether ordinary loads read something beside a tile a: lse and delta, or a bias."""
    return config.lse_delta_bytes > 0 or config.bias_boxes
