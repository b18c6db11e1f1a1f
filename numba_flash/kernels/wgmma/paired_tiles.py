"""Products with the tiles of a step if a cluster of two blocks, a pair, owns 64 rows: float32 gradients with head_dim
above 128.

A consumer has registers for 128 columns of a gradient, and shared memory has no room for wider tiles. So each block has
half of the columns of every tile, own or streamed. It computes half of the sum of each score,

    S = Q K^T = Q' K'^T + Q" K"^T        dP = dO V^T = dO' V'^T + dO" V"^T

sends it to the other block, and adds up both halves (paired_scores.py). Then both blocks have P and dS, and each
computes its own columns of dV and dK, or of dQ. No product is computed twice, only P and dS.

Streamed tiles have 64 rows: with fewer, a product of scores takes longer to read its tiles from shared memory than to
multiply. There are two places for them, each of two panels of 64 columns. One holds a tile a (Q or K), the other a tile
b (dO or V). The next tile a is loaded to the place of b, panel by panel, when nobody needs b any more:

    tensor cores   S(n)  dP(n)  dV(n)  dK(n)             S(n+1)            dP(n+1) ...
    loads                              a(n+1) for b(n)   b(n+1) for a(n)

So the next tile a arrives while the last one is still read. Two mbarriers count its readers, in alternation.
"""

from numba import int32, uint32

from ...ptx import cluster, fence, ld_st, mbarrier, special, wgmma
from ..steps.inlined import inlined
from . import backward_products_float32, paired_scores
from .backward_producer_float32 import elected
from .backward_tiles_float32 import Tiles


def places(config):
    """-> (place_of_a, place_of_b, empty_of_a), device functions of (base, n): the places of the tiles of step n, and
    the mbarriers that count the readers of a."""
    streamed, place_bytes = config.shared_layout().stream, config.panels * config.panel_bytes
    a_empty, panels = config.barriers().a_empty, config.panels

    @inlined
    def place_of_a(base, n):
        return int32(base + streamed + (n & 1) * place_bytes)

    @inlined
    def place_of_b(base, n):
        return int32(base + streamed + ((n & 1) ^ 1) * place_bytes)

    @inlined
    def empty_of_a(base, n):
        return int32(base + a_empty + (n & 1) * 8 * panels)

    return place_of_a, place_of_b, empty_of_a


def make(config):
    plan, at = config.shared_layout(), config.barriers()
    a, b = (backward_products_float32.make(config, n) for n in (config.head_dim_padded, config.head_dim_v_padded))
    place_of_a, place_of_b, empty_of_a = places(config)
    of_s = paired_scores.make(config, plan.weights, at.scores_full, at.scores_empty)
    of_dp = paired_scores.make(config, plan.score_gradients, at.score_gradients_full, at.score_gradients_empty)
    commit, wait_but_one, two_b = wgmma.commit_group, wgmma.wait_group(1), b.panels > 1

    @inlined
    def set_up(base):
        """A warp arrives once, whether it belongs to the producer or to a consumer, here or in the other block."""
        for panel in range(config.panels):
            mbarrier.init(base + at.a_full + 8 * panel, 4)
            mbarrier.init(base + at.b_full + 8 * panel, 4)
            mbarrier.init(base + at.b_empty + 8 * panel, 4 * config.of_dv + 4 * config.has_second)
        for panel in range(2 * config.panels):
            mbarrier.init(base + at.a_empty + 8 * panel, 4 + 4 * config.has_second)
        mbarrier.init(base + at.scores_full, 4)
        mbarrier.init(base + at.scores_empty, 4)
        mbarrier.init(base + at.score_gradients_full, 4)
        mbarrier.init(base + at.score_gradients_empty, 4)
        mbarrier.init(base + at.weights_full, 4)
        fence.mbarrier_init()

    @inlined
    def start():
        cluster.sync()

    @inlined
    def leave(base, found):
        """Afterwards neither block needs the other, and all that both wrote is visible. If a row is not finite in
        either block, the first block computes the whole row again."""
        note = int32(base + plan.struck + (special.thread_index() >> int32(5)) * 4)
        first = cluster.rank() == 0
        if not first and elected():
            cluster.store_b32(cluster.place_in(note, 0), found)
        cluster.sync()
        return uint32(found | ld_st.load_b32(note)) if first else uint32(0)

    @inlined
    def empty_of_b(base, n):
        return int32(base + at.b_empty)

    @inlined
    def give_back(empty, first):
        """Releases the panels from `first` on, including those that only the other kind of tile has."""
        for panel in range(first, config.panels):
            mbarrier.arrive_if(empty + 8 * panel, elected())

    def of_kind(products, full, own, place_of, empty_of, is_a):
        issue_first, issue_second = products.issue_first_scores, products.issue_second_scores
        finish_first, finish_second = products.finish_first_sums, products.finish_second_sums
        issue_sums, two_panels = products.issue_sums, products.panels > 1

        @inlined
        def wait(base, n):
            """Waits for the first panel."""
            mbarrier.wait(base + full, n & 1)

        @inlined
        def issue(acc, other, base, n):
            issue_first(acc, int32(base + own), place_of(base, n))
            if two_panels:
                commit()
                mbarrier.wait(base + full + 8, n & 1)
                issue_second(other, int32(base + own), place_of(base, n))
            commit()

        @inlined
        def issue_of_sums(even, odd, frag, base, n):
            if two_panels and not is_a:  # for a the first consumer has waited before its weights
                mbarrier.wait(base + full + 8, n & 1)
            issue_sums(even, odd, frag, place_of(base, n))

        @inlined
        def finish_of_sums(acc, even, odd, frag, base, n):
            finish_first(acc, even)
            mbarrier.arrive_if(empty_of(base, n), elected())
            finish_second(acc, odd, frag)
            give_back(empty_of(base, n), 1)

        return (wait, issue), (issue_of_sums, finish_of_sums)

    @inlined
    def finish_s(acc, other, base, n):
        a.finish_scores(acc, other)
        give_back(empty_of_a(base, n), 0)
        of_s.give(acc, base, n)
        of_s.take(acc, base, n)
        if not config.has_second:
            of_s.give_back(base)

    @inlined
    def finish_dp(acc, other, base, n):
        if two_b:  # the next tile a may be loaded beside the second panel
            wait_but_one()
            mbarrier.arrive_if(empty_of_b(base, n), elected())
        b.finish_scores(acc, other)
        give_back(empty_of_b(base, n), int32(two_b))
        of_dp.give(acc, base, n)
        of_dp.take(acc, base, n)
        of_dp.give_back(base)

    @inlined
    def await_weights_place(base, n):
        """The place is that of the other block's half of S, which the same thread has read."""

    scores_a, sums_a = of_kind(a, at.a_full, plan.own_a, place_of_a, empty_of_a, True)
    scores_b, sums_b = of_kind(b, at.b_full, plan.own_b, place_of_b, empty_of_b, False)
    return Tiles(
        set_up, start, leave, *scores_a, finish_s, *scores_b, finish_dp, *sums_a, *sums_b, await_weights_place,
        of_s.give_back,
    )  # fmt: skip
