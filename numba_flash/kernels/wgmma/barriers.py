"""What the roles of a block of wgmma's forward share: its pipelines, and its work tiles.

Places are in bytes from the block's base in shared memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import int32

from ..steps.inlined import inlined
from ..steps.query_tile import QueryTile
from .block import BYTES, FIRST_ROW, B, H, words
from .pipeline import Pipeline, pipeline

WORK_TILES = 4  # the scheduler writes them; a block has a ring of four
word, word_alone, position, _, write, write_tile = words()


class Pipelines(NamedTuple):
    """The rings of a block. bias has one place for each consumer and stage: that of consumer c is at base + 8 * c."""

    q: Pipeline
    tiles: Pipeline  # work tiles, from the scheduler to all other roles
    k: Pipeline
    v: Pipeline
    bias: Pipeline
    asked: Pipeline  # the scheduler waits here until the producer asks for the next query tile
    work_tile: Callable[..., Any]  # (base, i) -> where the work tile of the block's i-th query tile is


@inlined
def tile_of(work_tile):
    """The QueryTile that a work tile describes."""
    return QueryTile(word(work_tile, B), word(work_tile, H), word(work_tile, FIRST_ROW), int32(0))


@functools.cache
def make(config) -> Pipelines:
    """8 bytes for each mbarrier: Q's full and empty ones twice, those of work tiles, the one of the scheduler, and then
    those of K and V for each stage, the work tiles, and those of a bias."""
    at = config.shared_layout().barriers
    q_full, q_empty, tile_full, tile_empty, asked = at, at + 16, at + 32, at + 64, at + 96
    k_full, v_full, k_empty, v_empty, work_tiles_at = (at + 112 + 8 * config.stages * i for i in range(5))
    bias_full = work_tiles_at + BYTES * WORK_TILES
    bias_empty = bias_full + 8 * config.bias_stages * config.consumers
    tiles = pipeline(tile_full, tile_empty, WORK_TILES)

    @inlined
    def work_tile(base, i):
        return base + work_tiles_at + BYTES * tiles.stage(i)

    return Pipelines(
        pipeline(q_full, q_empty, config.q_buffers),
        tiles,
        pipeline(k_full, k_empty, config.stages),
        pipeline(v_full, v_empty, config.stages),
        pipeline(bias_full, bias_empty, max(config.bias_stages, 1), 8 * config.consumers),
        pipeline(asked, None),
        work_tile,
    )


def starter(config, fillers):
    """-> set_up(base), a device function: one thread initialises the mbarriers, before a fence and a barrier. fillers:
    number of arrivals that fill K or V."""
    rings, consumers = make(config), config.consumers
    bias_consumers = consumers if config.bias_stages else 0

    @inlined
    def set_up(base):
        rings.asked.init(base, 1, 0)
        rings.q.init(base, 1, 4 * consumers)
        rings.tiles.init(base, 1, 4 * consumers)
        rings.k.init(base, fillers, 4 * consumers)
        rings.v.init(base, fillers, 4 * consumers)
        for consumer in range(bias_consumers):
            rings.bias.init(base + 8 * consumer, 1, 128)

    return set_up
