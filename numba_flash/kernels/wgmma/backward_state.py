"""What the roles of a wgmma backward block share: its mbarriers, and the block's state, words that describe its work.

Places are in bytes from the block's base in shared memory.
"""

import functools
from typing import NamedTuple

from ...ptx import mbarrier
from ..steps.inlined import inlined
from .pipeline import Pipeline, pipeline


class Pipelines(NamedTuple):
    """The rings of a block: its own tile, its state, the tiles a and b that it walks over, dS and parts of dQ. dq has
    one place for each consumer and stage: that of consumer c is at base + 8 * c."""

    own: Pipeline
    state: Pipeline
    a: Pipeline
    b: Pipeline
    ds: Pipeline
    dq: Pipeline


def streamed(config) -> tuple[Pipeline, Pipeline]:
    """The pipelines of the tiles a and b that a block walks over."""
    at = config.barriers()
    return pipeline(at.a_full, at.a_empty, config.stages_a), pipeline(at.b_full, at.b_empty, config.stages_b)


@functools.cache
def pipelines(config) -> Pipelines:
    at = config.barriers()
    return Pipelines(
        pipeline(at.own_full, at.own_empty),
        pipeline(at.state_full, at.state_empty, config.states),
        *streamed(config),
        pipeline(at.ds_full, None),
        pipeline(at.dq_full, at.dq_empty, max(config.dq_stages, 1), 8 * config.consumers),
    )


@functools.cache
def make(config):
    """-> set_up(base), a device function."""
    rings = pipelines(config)
    consumers, consumer_warps, has_dq = config.consumers, 4 * config.consumers, config.dq_stages > 0
    # Arrivals that release a state: the consumers, the thread that loads dO, and those that add dQ.
    stays, exchanges = config.stays, config.ds_bytes > 0
    state_readers = 32 * consumer_warps + 1 + (consumers if has_dq else 0)
    beside = config.lse_delta_bytes or config.bias_boxes  # what threads read of a tile themselves, apart from wgmma
    a_readers = 32 * consumer_warps if beside else consumer_warps

    @inlined
    def set_up(base):
        """One thread initialises the mbarriers, before a fence and a barrier of the block."""
        if stays:
            rings.own.init(base, 1, consumer_warps)
            rings.state.init(base, 1, state_readers)
        else:
            mbarrier.init(rings.own.full(base, 0), 1)
        rings.a.init(base, 1, a_readers)
        rings.b.init(base, 1, consumer_warps)
        if exchanges:
            rings.ds.init(base, 128 * consumers, 0)
        if has_dq:
            for consumer in range(consumers):
                rings.dq.init(base + 8 * consumer, 128, 1)

    return set_up
