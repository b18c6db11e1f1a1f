"""Products of the float32 backward on wgmma with the tiles of a step, from two rings of tiles, a and b. They wait until
a tile may be read and release it afterwards. A pair of blocks uses paired_tiles.py instead."""

from numba import cuda, int32

from ...ptx import fence, wgmma
from ..steps.basics import inlined, named
from . import backward_products_float32, pipeline
from .block import elected


def make(config):
    """-> device functions. base: the block's shared memory; n: the step, from 0 on; acc, other, even, odd and frag as
    in backward_products_float32.py.

    `a` and `b` have those for one kind of tile: `wait` until its products may be issued; `issue` and `finish` scores, S
    with a and dP with b; `issue_sums` and `finish_sums`. What finishes waits for its product and releases the tile if
    nobody else needs it. `products` has the numbers of registers.
    """
    plan, at, (ring_a, ring_b) = config.shared_layout(), config.barriers(), pipeline.streamed(config)
    weights = pipeline.pipeline(at.weights_full, at.weights_empty, 1)

    @inlined
    def set_up(base):
        """One thread initialises the mbarriers. A warp arrives once, whether it belongs to the producer or to a
        consumer."""
        ring_a.init(base, 4, 4 + 4 * config.has_second)
        ring_b.init(base, 4, 4 * config.of_dv + 4 * config.has_second)
        weights.init(base, 4, 4)
        fence.mbarrier_init()

    @inlined
    def start():
        """All threads, after what one thread has set up."""
        cuda.syncthreads()

    @inlined
    def leave(base, found):
        """All threads, at the end. found: rows of the warp that are not finite. -> those that it computes again"""
        return found

    @inlined
    def await_weights_place(base, n):
        """The first consumer, before it hands over weights."""
        if config.has_second:
            weights.producer_acquire(base, n)

    @inlined
    def give_weights_place(base):
        """The second consumer, once a warp has read them."""
        weights.consumer_release(base, 0, elected())

    def of_kind(columns, ring, own, streamed, tile_bytes):
        products = backward_products_float32.make(config, columns)

        @inlined
        def place_of(base, n):
            return int32(base + streamed + ring.stage(n) * tile_bytes)

        @inlined
        def issue(acc, other, base, n):
            products.issue_first_scores(acc, int32(base + own), place_of(base, n))
            products.issue_second_scores(other, int32(base + own), place_of(base, n))
            wgmma.commit_group()

        @inlined
        def finish(acc, other, base, n):
            products.finish_scores(acc, other)
            ring.consumer_release(base, n, elected())

        @inlined
        def issue_sums(even, odd, frag, base, n):
            products.issue_sums(even, odd, frag, place_of(base, n))

        @inlined
        def finish_sums(acc, even, odd, frag, base, n):
            products.finish_first_sums(acc, even)
            products.finish_second_sums(acc, odd, frag)
            ring.consumer_release(base, n, elected())

        return named(issue, finish, issue_sums, finish_sums, wait=ring.consumer_wait, products=products)

    a = of_kind(config.head_dim_padded, ring_a, plan.own_a, plan.stream_a, config.stream_a_bytes)
    b = of_kind(config.head_dim_v_padded, ring_b, plan.own_b, plan.stream_b, config.stream_b_bytes)
    return named(set_up, start, leave, await_weights_place, give_weights_place, a=a, b=b)
