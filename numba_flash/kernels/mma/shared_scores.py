"""Scores whose columns two blocks of a cluster share, in float64: each multiplies its half, and both add up the halves.

A thread hands its numbers to the same thread of the other block, into its shared memory, as soon as that one has read
the last ones. The sum of both halves is the same in both blocks, because a + b is b + a.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float64, int32, uint32

from ...ptx import bar, cluster, ld_st, mbarrier, special
from ..steps.inlined import inlined
from .backward_dq_parts import bits_of_f64


class SharedScores(NamedTuple):
    """Device functions. at: where scores of the other block come to; behind them are two mbarriers of each warp: they
    have come, and the other block has read what this one gave."""

    begin: Callable[..., Any]  # (at): by one thread, before all threads of the cluster meet
    add_other: Callable[..., Any]  # (acc, t, at): acc of tile t += what the other block has


def make(config, count):
    """count: of numbers that a thread has."""
    workers, warps = config.workers, config.workers // 32
    place_bytes = workers * count * 8

    @inlined
    def begin(at):
        for n in range(2 * warps):
            mbarrier.init(int32(at + place_bytes + 8 * n), 1)

    @inlined
    def add_other(acc, t, at):
        thread, other = special.thread_index(), cluster.rank() ^ 1
        elected = thread & int32(31) == 0
        full = int32(at + place_bytes + 16 * (thread >> int32(5)))
        empty, place = int32(full + 8), int32(at + thread * 16)
        to, arrived = cluster.place_in(place, other), cluster.place_in(full, other)
        words, pair = cuda.local.array(4, uint32), cuda.local.array(2, float64)
        mbarrier.wait(empty, (t & 1) ^ 1)
        for n in range(count // 2):
            pair[0], pair[1] = acc[2 * n], acc[2 * n + 1]
            bits_of_f64(pair, words)
            cluster.store_v4(int32(to + n * (16 * workers)), words, 0, arrived)
        mbarrier.arrive_expect_tx_if(full, 32 * 8 * count, elected)
        mbarrier.wait(full, t & 1)
        for n in range(count // 2):
            ld_st.load_v2_f64(pair, 0, int32(place + n * (16 * workers)))
            acc[2 * n] += pair[0]
            acc[2 * n + 1] += pair[1]
        bar.warp_sync()
        mbarrier.arrive_there_if(cluster.place_in(empty, other), elected)

    return SharedScores(begin, add_other)
