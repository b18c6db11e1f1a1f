"""Which query tiles of packed sequences a block takes: of one sequence after the other, of each the last queries first.

Only tiles that exist have a number, whatever max_seqlen_q says: no role meets a tile behind a sequence's end. The
numbers of a block's tiles rise, so its scheduler looks for the next one from the sequence of the last one on. It is a
warp, whose lanes look at 32 sequences at a time: one thread took longer than the consumers for a short tile.
"""

from numba import int32, uint32

from ...ptx import bar, bits, shfl, special, vote
from ..steps.basics import inlined, tiles_of
from ..steps.head_rounds import in_rounds
from ..steps.sequence import make as make_sequence, queries as make_queries
from .block import BEFORE, SEQUENCE, word_alone, write


def make(config, heads_at_once, work_tile):
    """-> find(base, i, t, arrays, strides, sizes) -> (b, h, first_query) of query tile t, the block's i-th; b >= batch:
    none is left. By a warp. heads_at_once(keys, heads, sizes); work_tile(base, i): where the block's i-th tile is
    described."""
    rows, sequence_of, queries_of = config.queries, make_sequence(config), make_queries(config)

    @inlined
    def find(base, i, t, arrays, strides, sizes):
        lane, heads, batch = int32(special.thread_index() & int32(31)), int32(sizes.heads), int32(sizes.batch)
        own, b, before, tiles = work_tile(base, int32(0)), int32(0), int32(0), int32(0)
        if i > 0:
            b, before = word_alone(own, SEQUENCE), word_alone(own, BEFORE)
        looking = True
        while looking:
            tiles = int32(0)
            if b + lane < batch:
                tiles = tiles_of(queries_of(int32(b + lane), arrays, strides, sizes).seqlen_q, rows)
            behind = int32(tiles * heads)  # how many tiles there are up to the end of the lane's sequence
            for n in range(5):
                others = int32(shfl.idx_b32(uint32(behind), int32(lane - (1 << n))))
                behind = int32(behind + others) if lane >= 1 << n else behind
            passed = bits.count(vote.ballot(uint32(1) if int32(t) - before >= behind else uint32(0)))
            looking = passed == 32
            last = min(passed, int32(31))
            tiles = int32(shfl.idx_b32(uint32(tiles), last))
            before = int32(before + int32(shfl.idx_b32(uint32(behind), last)))
            if not looking:
                before = int32(before - tiles * heads)
            b = int32(b + passed)
            looking = looking and b < batch
        bar.warp_sync()  # all lanes have read these words
        if lane == 0:
            write(own, SEQUENCE, b)
            write(own, BEFORE, before)
        h, first_query = int32(0), int32(0)
        if b < batch:
            keys = int32(sequence_of(b, arrays, strides, sizes).keys)
            h, from_last = in_rounds(int32(int32(t) - before), tiles, heads, heads_at_once(keys, heads, sizes))
            first_query = int32((tiles - 1 - from_last) * rows)
        return b, int32(h), first_query

    return find
