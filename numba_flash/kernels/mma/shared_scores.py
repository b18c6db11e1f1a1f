"""Scores whose columns two blocks of a cluster share, in float64: each multiplies its half, and both add up the halves.

A thread hands its numbers to the same thread of the other block, into its shared memory, when their place there is free
(backward_dq_parts.py). The sum of both halves is the same in both blocks, because a + b is b + a.
"""

import numpy as np
from numba import float64, int32, uint32, uint64

from ...ptx import bar, cluster, ld_st, local, mbarrier, special
from ..steps.basics import inlined, named


@inlined
def bits_of(values, words):
    """words (4,) <- 16 bytes of values."""
    for x in range(2):
        both = values[x].view(np.uint64)
        words[2 * x], words[2 * x + 1] = uint32(both & uint64(0xFFFFFFFF)), uint32(both >> uint64(32))


def make(config, count):
    """count: how many numbers a thread has. bars: an mbarrier of each warp, which completes when scores have come."""
    warps = config.workers // 32

    @inlined
    def begin(bars):
        """One thread sets up the mbarriers, before all threads of the cluster meet."""
        for n in range(warps):
            mbarrier.init(int32(bars + 8 * n), 1)

    @inlined
    def add_other(acc, t, at, bars):
        """acc of tile t += the other block's numbers. at: where they arrive for the warp."""
        thread, other = special.thread_index(), cluster.rank() ^ 1
        elected = thread & int32(31) == 0
        full, place = int32(bars + 8 * (thread >> int32(5))), int32(at + (thread & int32(31)) * 16)
        to, arrived = cluster.place_in(place, other), cluster.place_in(full, other)
        words, pair = local.array(4, uint32), local.array(2, float64)
        for n in range(count // 2):
            pair[0], pair[1] = acc[2 * n], acc[2 * n + 1]
            bits_of(pair, words)
            cluster.store_v4(int32(to + n * 512), words, 0, arrived)
        mbarrier.arrive_expect_tx_if(full, 32 * 8 * count, elected)
        mbarrier.wait(full, t & 1)
        for n in range(count // 2):
            ld_st.load_v2_f64(pair, 0, int32(place + n * 512))
            acc[2 * n] += pair[0]
            acc[2 * n + 1] += pair[1]
        bar.warp_sync()  # all lanes have read

    return named(begin, add_other)
