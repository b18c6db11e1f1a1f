"""Products with the tiles of a step if a cluster of two blocks, a pair, owns 64 rows: float32 gradients with head_dim
above 128.

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

from ...ptx import bar, cluster, fence, ld_st, local, mbarrier, special, wgmma
from ..steps.basics import inlined, named
from . import backward_products_float32
from .block import elected, own_thread
from .operands import wait_but_one
from .pipeline import pipeline


def places(config):
    """-> (place_of_a, place_of_b), device functions of (base, n): the places of the tiles of step n."""
    streamed, place_bytes = config.shared_layout().stream, config.panels * config.panel_bytes

    @inlined
    def place_of_a(base, n):
        return int32(base + streamed + (n & 1) * place_bytes)

    @inlined
    def place_of_b(base, n):
        return int32(base + streamed + ((n & 1) ^ 1) * place_bytes)

    return place_of_a, place_of_b


def panel_rings(config):
    """-> the pipelines of the first panels of a and b; those of the next panel are 8 bytes further from the base. A
    tile a comes while the last one is still read, so its mbarriers are there twice."""
    at = config.barriers()
    return pipeline(at.a_full, at.a_empty, 2, 8 * config.panels), pipeline(at.b_full, at.b_empty)


def exchange(config, scores_at, ring):
    """-> device functions of a consumer warpgroup, for one of the two kinds of scores, and their ring. n: the step,
    from 0 on. scores_at: where the other block's scores arrive. ring: a Pipeline of one place: full, they have arrived;
    empty, the other block has read what this one gave. A warp arrives once."""
    blocks = config.other_rows // 8

    @inlined
    def place_of(base):
        """The place of the thread's first four numbers."""
        return int32(base + scores_at + own_thread() * 16)

    @inlined
    def give(acc, base, n):
        """To the other block, as soon as it has read the last ones."""
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
        """acc += the other block's numbers."""
        four, place = local.array(4, uint32), place_of(base)
        mbarrier.arrive_expect_tx_if(ring.full(base, n), blocks * 512, elected())
        ring.consumer_wait(base, n)
        for block in range(blocks):
            ld_st.load_v4(four, 0, int32(place + block * 2048))
            for x in range(4):
                acc[4 * block + x] = float32(acc[4 * block + x] + four[x].view(np.float32))

    @inlined
    def give_back(base):
        """By the last reader of the place; the other block may fill it again."""
        bar.warp_sync()
        mbarrier.arrive_there_if(cluster.place_in(ring.empty(base, 0), cluster.rank() ^ 1), elected())

    return named(give, take, give_back, ring=ring)


def make(config):
    """-> as backward_tiles_float32.make."""
    plan, at = config.shared_layout(), config.barriers()
    a, b = (backward_products_float32.make(config, n) for n in (config.head_dim_padded, config.head_dim_v_padded))
    (place_of_a, place_of_b), (ring_a, ring_b) = places(config), panel_rings(config)
    weights = pipeline(at.weights_full, None)
    of_s = exchange(config, plan.weights, pipeline(at.scores_full, at.scores_empty))
    dp_ring = pipeline(at.score_gradients_full, at.score_gradients_empty)
    of_dp = exchange(config, plan.score_gradients, dp_ring)

    @inlined
    def set_up(base):
        """A warp arrives once, whether it belongs to the producer or to a consumer, here or in the other block."""
        for panel in range(config.panels):
            ring_a.init(base + 8 * panel, 4, 4 + 4 * config.has_second)
            ring_b.init(base + 8 * panel, 4, 4 * config.of_dv + 4 * config.has_second)
        of_s.ring.init(base, 4, 4)
        of_dp.ring.init(base, 4, 4)
        weights.init(base, 4, 0)
        fence.mbarrier_init()

    @inlined
    def start():
        cluster.sync()

    @inlined
    def leave(base, found):
        """Afterwards neither block needs the other, and all that both wrote is visible. If a row is not finite in
        either block, the first block computes the whole row again."""
        note = int32(base + plan.nonfinite + (special.thread_index() >> int32(5)) * 4)
        first = cluster.rank() == 0
        if not first and elected():
            cluster.store_b32(cluster.place_in(note, 0), found)
        cluster.sync()
        return uint32(found | ld_st.load_b32(note)) if first else uint32(0)

    def of_kind(products, ring, own, place_of, exchanged, is_a):
        two_panels = products.panels > 1

        @inlined
        def release(base, n, first):
            """Releases the panels from `first` on, including those that only the other kind of tile has."""
            for panel in range(first, config.panels):
                ring.consumer_release(base + 8 * panel, n, elected())

        @inlined
        def issue(acc, other, base, n):
            products.issue_first_scores(acc, int32(base + own), place_of(base, n))
            if two_panels:
                wgmma.commit_group()
                ring.consumer_wait(base + 8, n)
                products.issue_second_scores(other, int32(base + own), place_of(base, n))
            wgmma.commit_group()

        @inlined
        def finish(acc, other, base, n):
            if two_panels and not is_a:  # the next tile a may be loaded beside the second panel of b
                wait_but_one()
                ring.consumer_release(base, n, elected())
            products.finish_scores(acc, other)
            release(base, n, int32(two_panels and not is_a))
            exchanged.give(acc, base, n)
            exchanged.take(acc, base, n)
            if not is_a or not config.has_second:
                exchanged.give_back(base)

        @inlined
        def issue_sums(even, odd, frag, base, n):
            if two_panels and not is_a:  # for a the first consumer has waited before its weights
                ring.consumer_wait(base + 8, n)
            products.issue_sums(even, odd, frag, place_of(base, n))

        @inlined
        def finish_sums(acc, even, odd, frag, base, n):
            products.finish_first_sums(acc, even)
            ring.consumer_release(base, n, elected())
            products.finish_second_sums(acc, odd, frag)
            release(base, n, 1)

        # wait: for the first panel
        return named(issue, finish, issue_sums, finish_sums, wait=ring.consumer_wait, products=products)

    @inlined
    def await_weights_place(base, n):
        """The place is that of the other block's half of S, which the same thread has read."""

    of_a = of_kind(a, ring_a, plan.own_a, place_of_a, of_s, True)
    of_b = of_kind(b, ring_b, plan.own_b, place_of_b, of_dp, False)
    return named(set_up, start, leave, await_weights_place, give_weights_place=of_s.give_back, a=of_a, b=of_b)
