"""What the roles of a wgmma backward block share: its mbarriers, and the block's state, words that describe its work.

Places are in bytes from the block's base in shared memory.
"""

import functools

from numba import int32, int64, uint32

from ...ptx import ld_st, mbarrier, shfl
from ..steps.inlined import inlined

# Words of the block's state.
BATCH, HEAD, HEAD_KV, FIRST_ROW, KEYS, BEGIN, FREE, CUT, STOP, MEMBERS, POS_LOW, POS_HIGH = (4 * i for i in range(12))
STATES = 48  # where the states of a query tile begin (kernels/score/tile_walk.py)
# For a block that owns keys, whose query heads are HEAD to HEAD + MEMBERS - 1:
STEP = 52  # to the next query tile
PART = 56  # the index of its part among the parts of all groups (config.members)
STRUCK = 60  # whether some row of dQ is not finite (config.key_tiles)
# With a mask: FREE and CUT by positions alone. They replace words that no kernel with a mask uses:
POS_FREE, POS_CUT = STEP, STRUCK


@functools.cache
def ring(stages):
    """-> (stage_of, phase_of), device functions: the stage of the n-th tile in a ring, and the parity of its phase."""

    @inlined
    def stage_of(n):
        return int32(uint32(n) % uint32(stages))

    @inlined
    def phase_of(n):
        return int32(uint32(n) // uint32(stages)) & 1

    return stage_of, phase_of


@functools.cache
def make(config):
    """-> (set_up, put, put_position, word, position), device functions."""
    at, init = config.barriers(), mbarrier.init
    stages_a, stages_b, consumer_warps = config.stages_a, config.stages_b, 4 * config.consumers
    exchanges, consumers, dq_stages = config.ds_bytes > 0, config.consumers, config.dq_stages
    # Arrivals that release a state: the consumers, the thread that loads dO, and those that add dQ.
    stays, states = config.stays, config.states
    state_readers = 32 * consumer_warps + 1 + (consumers if dq_stages else 0)
    beside = config.lse_delta_bytes or config.bias_boxes  # what threads read of a tile themselves, apart from wgmma
    a_readers = 32 * consumer_warps if beside else consumer_warps

    @inlined
    def set_up(base):
        """One thread initialises the mbarriers, before a fence and a barrier of the block."""
        init(base + at.own_full, 1)
        if stays:
            init(base + at.own_empty, consumer_warps)
            for place in range(states):
                init(base + at.state_full + 8 * place, 1)
                init(base + at.state_empty + 8 * place, state_readers)
        for stage in range(stages_a):
            init(base + at.a_full + 8 * stage, 1)
            init(base + at.a_empty + 8 * stage, a_readers)
        for stage in range(stages_b):
            init(base + at.b_full + 8 * stage, 1)
            init(base + at.b_empty + 8 * stage, consumer_warps)
        if exchanges:
            init(base + at.ds_full, 128 * consumers)
            for part in range(dq_stages * consumers):
                init(base + at.dq_full + 8 * part, 128)
                init(base + at.dq_empty + 8 * part, 1)

    return set_up, *words(config)


@functools.cache
def words(config):
    """-> (put, put_position, word, position), device functions."""
    state = config.shared_plan().state
    load_b32, store_b32, idx_b32 = ld_st.load_b32, ld_st.store_b32, shfl.idx_b32

    @inlined
    def put(base, which, value):
        """Called by one thread, before a barrier of the block."""
        store_b32(base + state + which, uint32(int64(value) & int64(0xFFFFFFFF)))

    @inlined
    def put_position(base, value):
        put(base, POS_LOW, value)
        put(base, POS_HIGH, int64(value) >> int64(32))

    @inlined
    def word(base, which):
        """Called by a whole warp. The word is broadcast from one lane, so ptxas knows that it is uniform, and with it
        what depends on it. Only then does it keep descriptors and counts in uniform registers."""
        return int32(idx_b32(load_b32(int32(base + state + which)), 0))

    @inlined
    def position(base):
        """64 bits, because an offset may be any number. Called by a whole warp."""
        return int64(word(base, POS_HIGH)) << int64(32) | int64(uint32(word(base, POS_LOW)))

    return put, put_position, word, position
