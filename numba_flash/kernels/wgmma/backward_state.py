"""What the roles of a wgmma backward block share: its mbarriers, and the block's state, words that describe its work.

Places are in bytes from the block's base in shared memory.
"""

import functools
from typing import NamedTuple

from numba import int32, int64, uint32

from ...ptx import ld_st, mbarrier, shfl
from ..steps.inlined import inlined
from .pipeline import Pipeline, pipeline

# Words of the block's state.
BATCH, HEAD, HEAD_KV, FIRST_ROW, KEYS, BEGIN, FREE, CUT, STOP, MEMBERS, POS_LOW, POS_HIGH = (4 * i for i in range(12))
STATES = 48  # where the states of a query tile begin (kernels/score/tile_walk.py)
# For a block that owns keys, whose query heads are HEAD to HEAD + MEMBERS - 1:
STEP = 52  # to the next query tile
PART = 56  # the index of its part among the parts of all groups (config.members)
STRUCK = 60  # whether some row of dQ is not finite (config.key_tiles)
# With a mask: FREE and CUT by positions alone. They replace words that no kernel with a mask uses:
POS_FREE, POS_CUT = STEP, STRUCK


class Pipelines(NamedTuple):
    """The rings of a block: its own tile, its state, the tiles a and b that it walks over, and parts of dQ. dq has one
    place for each consumer and stage: that of consumer c is at base + 8 * c."""

    own: Pipeline
    state: Pipeline
    a: Pipeline
    b: Pipeline
    dq: Pipeline


def streamed(config) -> tuple[Pipeline, Pipeline]:
    """The pipelines of the tiles a and b that a block walks over."""
    at = config.barriers()
    return pipeline(at.a_full, at.a_empty, config.stages_a), pipeline(at.b_full, at.b_empty, config.stages_b)


@functools.cache
def pipelines(config) -> Pipelines:
    at = config.barriers()
    return Pipelines(
        pipeline(at.own_full, at.own_empty, 1),
        pipeline(at.state_full, at.state_empty, config.states),
        *streamed(config),
        pipeline(at.dq_full, at.dq_empty, max(config.dq_stages, 1), 8 * config.consumers),
    )


@functools.cache
def make(config):
    """-> (set_up, put, put_position, word, position), device functions."""
    rings, at, init = pipelines(config), config.barriers(), mbarrier.init
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
            init(base + at.own_full, 1)
        rings.a.init(base, 1, a_readers)
        rings.b.init(base, 1, consumer_warps)
        if exchanges:
            init(base + at.ds_full, 128 * consumers)
        if has_dq:
            for consumer in range(consumers):
                rings.dq.init(base + 8 * consumer, 128, 1)

    return set_up, *words(config)


@functools.cache
def words(config):
    """-> (put, put_position, word, position), device functions."""
    state = config.shared_layout().state

    @inlined
    def put(base, which, value):
        """Called by one thread, before a barrier of the block."""
        ld_st.store_b32(base + state + which, uint32(int64(value) & int64(0xFFFFFFFF)))

    @inlined
    def put_position(base, value):
        put(base, POS_LOW, value)
        put(base, POS_HIGH, int64(value) >> int64(32))

    @inlined
    def word(base, which):
        """Called by a whole warp. The word is broadcast from one lane, so ptxas knows that it is uniform, and with it
        what depends on it. Only then does it keep descriptors and counts in uniform registers."""
        return int32(shfl.idx_b32(ld_st.load_b32(int32(base + state + which)), 0))

    @inlined
    def position(base):
        """64 bits, because an offset may be any number. Called by a whole warp."""
        return int64(word(base, POS_HIGH)) << int64(32) | int64(uint32(word(base, POS_LOW)))

    return put, put_position, word, position
