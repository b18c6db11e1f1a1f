"""A cluster of two blocks, a pair, owns 64 rows: float32 gradients with head_dim above 128.

A consumer has registers for 128 columns of a gradient, and shared memory has no room for wider tiles. So each block has
half of the columns of every tile, own or streamed. It computes half of the sum of each score,

    S = Q K^T = Q' K'^T + Q" K"^T        dP = dO V^T = dO' V'^T + dO" V"^T

sends it to the other block, and adds up both halves. A thread writes its numbers to the shared memory of the other
block, for the same thread there. Both blocks get the same sum, because a + b is b + a. Then both have P and dS, and
each computes its own columns of dV and dK, or of dQ. No product is computed twice, only P and dS.

Streamed tiles have 64 rows: with fewer, a product of scores takes longer to read its tiles from shared memory than to
multiply. There are two places for them, each of two panels of 64 columns. One holds a tile a (Q or K), the other a tile
b (dO or V). The next tile a is loaded to the place of b, panel by panel, when nobody needs b any more:

    tensor cores   S(n)  dP(n)  dV(n)  dK(n)             S(n+1)            dP(n+1) ...
    loads                              a(n+1) for b(n)   b(n+1) for a(n)

So the next tile a arrives while the last one is still read. Two mbarriers count its readers, in alternation.
"""

import numpy as np
from numba import float32, int32, uint32

from ...ptx import bar, cluster, ld_st, local, mbarrier, special
from ..steps.basics import inlined, named
from .block import elected, own_thread
from .pipeline import pipeline


def places(config):
    """-> as backward_tiles_float32.places. The mbarriers of a tile's next panel are 8 bytes further from the base.
    `acquire` waits until the tile of the other kind that was there has been read: the last b, or the last a, which is
    two before the next."""
    at, streamed, place_bytes = config.barriers(), config.shared_layout().stream, config.panels * config.panel_bytes
    ring_a, ring_b = pipeline(at.a_full, at.a_empty, 2, 8 * config.panels), pipeline(at.b_full, at.b_empty)

    @inlined
    def at_a(base, n):
        return int32(base + streamed + (n & 1) * place_bytes)

    @inlined
    def at_b(base, n):
        return int32(base + streamed + ((n & 1) ^ 1) * place_bytes)

    @inlined
    def acquire_b(base, n):
        ring_a.producer_acquire(base, int32(n + 1))

    a = named(at=at_a, ring=ring_a, acquire=ring_b.producer_acquire)
    return a, named(at=at_b, ring=ring_b, acquire=acquire_b)


def exchanges(config):
    """-> those of S and dP: a ring of one place, and device functions of a consumer warpgroup. n: the step, from 0 on.
    A warp arrives once at `full`, when scores have arrived, and at `empty`, when the other block has read what this one
    sent."""
    plan, at, blocks = config.shared_layout(), config.barriers(), config.other_rows // 8

    def exchange(scores_at, ring):
        @inlined
        def place_of(base):
            """The place of the thread's first four numbers."""
            return int32(base + scores_at + own_thread() * 16)

        @inlined
        def send(acc, base, n):
            """Sends acc to the other block, as soon as it has read the last numbers."""
            four = local.array(4, uint32)
            other = cluster.rank() ^ 1
            place, arrived = cluster.place_in(place_of(base), other), cluster.place_in(ring.full(base, n), other)
            ring.producer_acquire(base, n)
            for block in range(blocks):
                for x in range(4):
                    four[x] = acc[4 * block + x].view(np.uint32)
                cluster.store_v4(int32(place + block * 2048), four, 0, arrived)

        @inlined
        def receive(acc, base, n):
            """acc += the other block's numbers."""
            four, place = local.array(4, uint32), place_of(base)
            mbarrier.arrive_expect_tx_if(ring.full(base, n), blocks * 512, elected())
            ring.consumer_wait(base, n)
            for block in range(blocks):
                ld_st.load_v4(four, 0, int32(place + block * 2048))
                for x in range(4):
                    acc[4 * block + x] = float32(acc[4 * block + x] + four[x].view(np.float32))

        @inlined
        def release(base):
            """The last reader of the place lets the other block fill it again."""
            bar.warp_sync()
            mbarrier.arrive_there_if(cluster.place_in(ring.empty(base, 0), cluster.rank() ^ 1), elected())

        return named(send, receive, release, ring=ring)

    of_s = exchange(plan.weights, pipeline(at.scores_full, at.scores_empty))
    return of_s, exchange(plan.score_gradients, pipeline(at.score_gradients_full, at.score_gradients_empty))


def gather_rows(config):
    """-> gather(base, found), a device function of all threads at the end. found: rows of the warp that are not finite.
    -> those that are so in either block, and of which the first block computes all columns again. Afterwards neither
    block needs the other, and all that both wrote is visible."""
    nonfinite = config.shared_layout().nonfinite

    @inlined
    def gather(base, found):
        note = int32(base + nonfinite + (special.thread_index() >> int32(5)) * 4)
        first = cluster.rank() == 0
        if not first and elected():
            cluster.store_b32(cluster.place_in(note, 0), found)
        cluster.sync()
        return uint32(found | ld_st.load_b32(note)) if first else uint32(0)

    return gather
