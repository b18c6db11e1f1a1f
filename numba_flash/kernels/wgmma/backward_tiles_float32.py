"""Products of the float32 backward on wgmma with the tiles of a step, from two rings of tiles, a and b. They wait until
a tile may be read and release it afterwards. A pair of blocks uses paired_tiles.py instead."""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, int32

from ...ptx import fence, mbarrier
from ..steps.inlined import inlined
from . import backward_products_float32, backward_state
from .backward_producer_float32 import elected


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
    of_dv, has_second, stages_a, stages_b = config.of_dv, config.has_second, config.stages_a, config.stages_b
    plan, at = config.shared_plan(), config.barriers()
    a_bytes, b_bytes = config.stream_a_bytes, config.stream_b_bytes
    a, b = (backward_products_float32.make(config, n) for n in (config.head_dim_padded, config.head_dim_v_padded))
    a_stage_of, a_phase_of = backward_state.ring(stages_a)
    b_stage_of, b_phase_of = backward_state.ring(stages_b)

    @inlined
    def set_up(base):
        """A warp arrives once, whether it belongs to the producer or to a consumer."""
        for stage in range(stages_a):
            mbarrier.init(base + at.a_full + 8 * stage, 4)
            mbarrier.init(base + at.a_empty + 8 * stage, 4 + 4 * has_second)
        for stage in range(stages_b):
            mbarrier.init(base + at.b_full + 8 * stage, 4)
            mbarrier.init(base + at.b_empty + 8 * stage, 4 * of_dv + 4 * has_second)
        mbarrier.init(base + at.weights_full, 4)
        mbarrier.init(base + at.weights_empty, 4)
        fence.mbarrier_init()

    @inlined
    def start():
        cuda.syncthreads()

    @inlined
    def leave(base, found):
        return found

    def of_kind(products, stage_of, phase_of, full, empty, own, streamed, tile_bytes):
        issue_scores, finish_scores = products.issue_scores, products.finish_scores
        issue_sums, finish_sums = products.issue_sums, products.finish_sums

        @inlined
        def wait(base, n):
            mbarrier.wait(base + full + 8 * stage_of(n), phase_of(n))

        @inlined
        def place_of(base, n):
            return int32(base + streamed + stage_of(n) * tile_bytes)

        @inlined
        def give_back(base, n):
            mbarrier.arrive_if(base + empty + 8 * stage_of(n), elected())

        @inlined
        def issue(acc, other, base, n):
            issue_scores(acc, other, int32(base + own), place_of(base, n))

        @inlined
        def finish(acc, other, base, n):
            finish_scores(acc, other)
            give_back(base, n)

        @inlined
        def issue_of_sums(even, odd, frag, base, n):
            issue_sums(even, odd, frag, place_of(base, n))

        @inlined
        def finish_of_sums(acc, even, odd, frag, base, n):
            finish_sums(acc, even, odd, frag)
            give_back(base, n)

        return (wait, issue, finish), (issue_of_sums, finish_of_sums)

    @inlined
    def await_weights_place(base, n):
        if has_second:
            mbarrier.wait(base + at.weights_empty, (n & 1) ^ 1)

    @inlined
    def give_weights_place(base):
        mbarrier.arrive_if(base + at.weights_empty, elected())

    of_a = a, a_stage_of, a_phase_of, at.a_full, at.a_empty, plan.own_a, plan.stream_a, a_bytes
    of_b = b, b_stage_of, b_phase_of, at.b_full, at.b_empty, plan.own_b, plan.stream_b, b_bytes
    (scores_a, sums_a), (scores_b, sums_b) = of_kind(*of_a), of_kind(*of_b)
    return Tiles(set_up, start, leave, *scores_a, *scores_b, *sums_a, *sums_b, await_weights_place, give_weights_place)
