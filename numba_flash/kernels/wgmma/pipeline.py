"""A ring of places in shared memory, with the mbarriers at which a producer and its consumers take turns.

A place has two mbarriers: `full`, at which consumers wait until the n-th tile is there, and `empty`, at which the
producer waits until all consumers have released the tile before it. The n-th tile is in place n % stages, and
(n // stages) & 1 is the parity of the phase in which that place is filled. A place that was never used counts as empty,
because the producer waits for the parity before.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32, uint32

from ...ptx import mbarrier
from ..steps.inlined import inlined


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
