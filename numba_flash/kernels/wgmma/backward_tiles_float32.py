"""Products of the float32 backward on wgmma with the tiles of a step, from two rings of tiles, a and b. They wait until
a tile may be read and release it afterwards. A pair of blocks uses paired_tiles.py instead."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, int32

from ...ptx import fence, wgmma
from ..steps.inlined import inlined
from . import backward_products_float32, pipeline
from .block import elected


class Tiles(NamedTuple):
    """Device functions. base: the block's shared memory; n: the step, from 0 on; acc, other, even, odd and frag as in
    backward_products_float32.py. A `finish` function waits for its product and releases the tile if nobody else needs
    it."""

    set_up: Callable[..., Any]  # (base): one thread initialises the mbarriers
    start: Callable[..., Any]  # (): all threads, after what one thread has set up
    leave: Callable[..., Any]  # (base, found) -> rows that the warp computes again; `found`: not finite; all threads
    await_a: Callable[..., Any]  # (base, n): waits until products with tile a may be issued
    issue_s: Callable[..., Any]  # (acc, other, base, n)
    finish_s: Callable[..., Any]  # (acc, other, base, n)
    await_b: Callable[..., Any]
    issue_dp: Callable[..., Any]
    finish_dp: Callable[..., Any]
    issue_a_sums: Callable[..., Any]  # (even, odd, frag, base, n)
    finish_a_sums: Callable[..., Any]  # (acc, even, odd, frag, base, n)
    issue_b_sums: Callable[..., Any]
    finish_b_sums: Callable[..., Any]
    await_weights_place: Callable[..., Any]  # (base, n): the first consumer waits before it hands over weights
    give_weights_place: Callable[..., Any]  # (base): the second consumer, once a warp has read them


def make(config):
    of_dv, has_second, plan, at = config.of_dv, config.has_second, config.shared_layout(), config.barriers()
    ring_a, ring_b = pipeline.streamed(config)
    weights = pipeline.pipeline(at.weights_full, at.weights_empty, 1)
    a, b = (backward_products_float32.make(config, n) for n in (config.head_dim_padded, config.head_dim_v_padded))

    @inlined
    def set_up(base):
        """A warp arrives once, whether it belongs to the producer or to a consumer."""
        ring_a.init(base, 4, 4 + 4 * has_second)
        ring_b.init(base, 4, 4 * of_dv + 4 * has_second)
        weights.init(base, 4, 4)
        fence.mbarrier_init()

    @inlined
    def start():
        cuda.syncthreads()

    @inlined
    def leave(base, found):
        return found

    def of_kind(products, ring, own, streamed, tile_bytes):
        @inlined
        def place_of(base, n):
            return int32(base + streamed + ring.stage(n) * tile_bytes)

        @inlined
        def give_back(base, n):
            ring.consumer_release(base, n, elected())

        @inlined
        def issue(acc, other, base, n):
            products.issue_first_scores(acc, int32(base + own), place_of(base, n))
            products.issue_second_scores(other, int32(base + own), place_of(base, n))
            wgmma.commit_group()

        @inlined
        def finish(acc, other, base, n):
            products.finish_scores(acc, other)
            give_back(base, n)

        @inlined
        def issue_of_sums(even, odd, frag, base, n):
            products.issue_sums(even, odd, frag, place_of(base, n))

        @inlined
        def finish_of_sums(acc, even, odd, frag, base, n):
            products.finish_first_sums(acc, even)
            products.finish_second_sums(acc, odd, frag)
            give_back(base, n)

        return (ring.consumer_wait, issue, finish), (issue_of_sums, finish_of_sums)

    @inlined
    def await_weights_place(base, n):
        if has_second:
            weights.producer_acquire(base, n)

    @inlined
    def give_weights_place(base):
        weights.consumer_release(base, 0, elected())

    scores_a, sums_a = of_kind(a, ring_a, plan.own_a, plan.stream_a, config.stream_a_bytes)
    scores_b, sums_b = of_kind(b, ring_b, plan.own_b, plan.stream_b, config.stream_b_bytes)
    return Tiles(set_up, start, leave, *scores_a, *scores_b, *sums_a, *sums_b, await_weights_place, give_weights_place)
