"""What the roles of a wgmma block share: the places of mbarriers and work tiles, and the order in which rings are used.

Places are in bytes from the block's base in shared memory.
"""

import functools

from numba import int32, uint32

from ...ptx import mbarrier
from ..steps.inlined import inlined

# A work tile describes a query tile in words. The scheduler writes it; a block has a ring of four.
WORK, B, H, H_KV, FIRST_QUERY, KEYS, BEGIN, FREE, CUT, STOP, POS_LOW, POS_HIGH, STATES = (4 * i for i in range(13))
POS_FREE, POS_CUT = 52, 56  # with a mask: FREE and CUT by positions alone
WORK_TILES = 4


@functools.cache
def ring(count):
    """-> (place_of, phase_of), device functions: the place of the n-th use in a ring of `count` places, and the parity
    of the phase in which that place is filled."""

    @inlined
    def place_of(n):
        return int32(uint32(n) % uint32(count))

    @inlined
    def phase_of(n):
        return int32(uint32(n) // uint32(count)) & 1

    return place_of, phase_of


@functools.cache
def make(config):
    """-> (the places of the mbarriers, work_tile_of), the last one a device function.

    mbarriers, 8 bytes each: Q_FULL, Q_EMPTY, TILE_FULL, TILE_EMPTY, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL,
    BIAS_EMPTY. Full and empty ones exist once for each stage of K and V, twice for Q, four times for work tiles, and
    for a bias once for each consumer and stage.
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
        """Where the work tile of the block's i-th query tile is."""
        return base + work_tiles_at + 64 * place_of(i)

    return (*singles, *rings, *of_bias), work_tile_of


def starter(config, fillers):
    """-> set_up(base), a device function: one thread initialises the mbarriers, before a fence and a barrier. fillers:
    number of arrivals that fill K or V."""
    places, _ = make(config)
    Q_FULL, Q_EMPTY, TILE_FULL, TILE_EMPTY, ASKED, K_FULL, V_FULL, K_EMPTY, V_EMPTY, BIAS_FULL, BIAS_EMPTY = places
    init, consumers, stages = mbarrier.init, config.consumers, config.stages
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
            init(base + K_EMPTY + 8 * stage, 4 * consumers)
            init(base + V_EMPTY + 8 * stage, 4 * consumers)
        for place in range(bias_places):
            init(base + BIAS_FULL + 8 * place, 1)
            init(base + BIAS_EMPTY + 8 * place, 128)

    return set_up
