"""What the roles of a wgmma block share: where mbarriers and work tiles are, and which place of a ring is used when.

Places are bytes from the block's base in shared memory.
"""

import functools

from numba import int32, uint32

from ...ptx import mbarrier
from ..steps.inlined import inlined

# A work tile is what the scheduler worked out about a query tile, in words; a block has four of them in a ring.
WORK, B, H, H_KV, FIRST_QUERY, KEYS, BEGIN, FREE, CUT, STOP, POS_LOW, POS_HIGH, STATES = (4 * i for i in range(13))
POS_FREE, POS_CUT = 52, 56  # with a mask: FREE and CUT as positions alone say
WORK_TILES = 4


@functools.cache
def ring(count):
    """-> (place_of, phase_of), device functions: where in a ring of so many places the n-th use is, and the parity of
    the phase in which that is filled."""

    @inlined
    def place_of(n):
        return int32(uint32(n) % uint32(count))

    @inlined
    def phase_of(n):
        return int32(uint32(n) // uint32(count)) & 1

    return place_of, phase_of


def make(config):
    """-> (where the mbarriers are, work_tile_of), the last one a device function.

    mbarriers, 8 bytes each: Q_FULL, Q_EMPTY, TILE_FULL, TILE_EMPTY, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL,
    BIAS_EMPTY. K and V have one of either kind for each stage, Q two and work tiles four, a bias one for each consumer
    and stage.
    """
    stages = config.stages
    barriers_at = config.shared_offsets()[-2]
    singles = tuple(barriers_at + offset for offset in (0, 16, 32, 64, 96))
    place_of, _ = ring(WORK_TILES)
    *rings, work_tiles_at = (barriers_at + 112 + 8 * stages * i for i in range(5))
    bias_full = work_tiles_at + 64 * WORK_TILES
    of_bias = bias_full, bias_full + 8 * config.bias_stages * config.consumers

    @inlined
    def work_tile_of(base, i):
        """Where the i-th query tile of the block is described."""
        return base + work_tiles_at + 64 * place_of(i)

    return (*singles, *rings, *of_bias), work_tile_of


def starter(config, fillers):
    """-> set_up(base), a device function: the mbarriers, by one thread, before a fence and a barrier. fillers: how many
    arrivals say that K or V has come."""
    places, _ = make(config)
    Q_FULL, Q_EMPTY, TILE_FULL, TILE_EMPTY, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL, BIAS_EMPTY = places
    init, consumers, blocks, stages = mbarrier.init, config.consumers, config.cluster, config.stages
    bias_places = config.bias_stages * consumers

    @inlined
    def set_up(base):
        for i in range(2):
            init(base + Q_FULL + 8 * i, 1)
            init(base + Q_EMPTY + 8 * i, 4 * consumers)
        init(base + ASKED, 1)
        for i in range(WORK_TILES):
            init(base + TILE_FULL + 8 * i, 1)
            init(base + TILE_EMPTY + 8 * i, 4 * consumers)
        for stage in range(stages):
            init(base + K_FULL + 8 * stage, fillers)
            init(base + V_FULL + 8 * stage, fillers)
            init(base + K_EMPTY + 8 * stage, 4 * consumers * blocks)
            init(base + V_EMPTY + 8 * stage, 4 * consumers * blocks)
        for place in range(bias_places):
            init(base + BIAS_FULL + 8 * place, 1)
            init(base + BIAS_EMPTY + 8 * place, 128)

    return set_up
