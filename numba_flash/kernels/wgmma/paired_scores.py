"""Scores of a tile whose columns two blocks share: each block multiplies its half, and adds the other block's.

A thread writes its numbers to the shared memory of the other block, for the same thread there. Both blocks get the same
sum, because a + b is b + a.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from ...ptx import bar, cluster, ld_st, local, mbarrier
from ..steps.inlined import inlined
from .block import elected, own_thread
from .pipeline import Pipeline


class Exchange(NamedTuple):
    """Device functions of a consumer warpgroup, for one of the two kinds of scores. n: the step, from 0 on."""

    give: Callable[..., Any]  # (acc, base, n): to the other block, as soon as it has read the last ones
    take: Callable[..., Any]  # (acc, base, n): acc += the other block's numbers
    ring: Pipeline
    give_back: Callable[..., Any]  # (base): by the last reader of the place; the other block may fill it again


def make(config, scores_at, ring):
    """scores_at: where the other block's scores arrive. ring: a Pipeline of one place: full, they have arrived; empty,
    the other block has read what this one gave. A warp arrives once."""
    blocks = config.stream_rows // 8

    @inlined
    def place_of(base):
        """The place of the thread's first four numbers."""
        return int32(base + scores_at + own_thread() * 16)

    @inlined
    def give(acc, base, n):
        four = local.array(4, uint32)
        other = cluster.rank() ^ 1
        place, arrived = cluster.place_in(place_of(base), other), cluster.place_in(ring.full(base, n), other)
        ring.producer_acquire(base, n)
        for block in range(blocks):
            for x in range(4):
                four[x] = acc[4 * block + x].view(np.uint32)
            cluster.store_v4(int32(place + block * 2048), four, 0, arrived)

    @inlined
    def take(acc, base, n):
        four, place = local.array(4, uint32), place_of(base)
        mbarrier.arrive_expect_tx_if(ring.full(base, n), blocks * 512, elected())
        ring.consumer_wait(base, n)
        for block in range(blocks):
            ld_st.load_v4(four, 0, int32(place + block * 2048))
            for x in range(4):
                acc[4 * block + x] = float32(acc[4 * block + x] + four[x].view(np.float32))

    @inlined
    def give_back(base):
        bar.warp_sync()
        mbarrier.arrive_there_if(cluster.place_in(ring.empty(base, 0), cluster.rank() ^ 1), elected())

    return Exchange(give, take, ring, give_back)
