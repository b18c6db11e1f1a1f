"""Which query tiles of packed sequences a block takes: of one sequence after the other, of each the last queries first.

Only tiles that exist have a number, whatever max_seqlen_q says: no role meets a tile behind a sequence's end. The
numbers of a block's tiles rise, so its scheduler looks for the next one from the sequence of the last one on.

If at most one in 16 of the tiles that the bound of the lengths allows has no query, or there is one for each sequence,
all of these have a number. Then nothing is looked for. With three consumers the scheduler has no registers to ask that.
"""

from collections.abc import Callable
from typing import Any

from numba import int32

from ..steps.head_rounds import in_rounds
from ..steps.inlined import inlined
from ..steps.integers import divide, tiles_of
from ..steps.sequence import make as make_sequence
from ..steps.sequence import queries as make_queries
from .block import BEFORE, SEQUENCE, word_alone, write


def asks_bound(config: Any) -> bool:
    return bool(config.packed and config.consumers < 3)


def make(config: Any, heads_at_once: Any, work_tile: Callable[..., Any]) -> Callable[..., Any]:
    """-> find(base, i, t, arrays, strides, sizes) -> (b, h, first_query) of query tile t, the block's i-th; b = batch:
    none is left. heads_at_once(keys, heads, sizes); work_tile(base, i): where the block's i-th tile is described."""
    rows, sequence_of, queries_of = config.queries, make_sequence(config), make_queries(config)
    ask_bound = asks_bound(config)

    @inlined
    def tiles_of_head(b, arrays, strides, sizes):
        return divide(int32(queries_of(b, arrays, strides, sizes).seqlen_q) + int32(rows - 1), rows)

    @inlined
    def place_in(b, number, tiles, arrays, strides, sizes):
        """-> (h, first_query) of a number of sequence b, which has `tiles` for each head."""
        heads, keys = int32(sizes.heads), int32(sequence_of(b, arrays, strides, sizes).keys)
        h, from_last = in_rounds(number, tiles, heads, heads_at_once(keys, heads, sizes))
        return int32(h), int32((tiles - 1 - from_last) * rows)

    @inlined
    def walk_to(base, i, t, arrays, strides, sizes):
        """-> (b, the number of query tiles before those of sequence b, its tiles of a head)."""
        b, before, heads, batch = int32(0), int32(0), int32(sizes.heads), int32(sizes.batch)
        own = work_tile(base, int32(0))
        if i > 0:
            b, before = word_alone(own, SEQUENCE), word_alone(own, BEFORE)
        tiles = tiles_of_head(b, arrays, strides, sizes)
        while b < batch and int32(t) - before >= tiles * heads:
            before, b = int32(before + tiles * heads), int32(b + 1)
            if b < batch:
                tiles = tiles_of_head(b, arrays, strides, sizes)
        write(own, SEQUENCE, b)
        write(own, BEFORE, before)
        return b, before, tiles

    @inlined
    def find(base, i, t, arrays, strides, sizes):
        batch, most = int32(sizes.batch), tiles_of(sizes.seqlen_q, rows)
        h, first_query = int32(0), int32(0)
        if ask_bound and most <= max(divide(divide(sizes.total_q, rows) * 17, batch * 16), 1):
            of_sequence = int32(most * int32(sizes.heads))
            b, tiles = divide(t, of_sequence), most
            before = int32(b * of_sequence)
        else:
            b, before, tiles = walk_to(base, i, t, arrays, strides, sizes)
        if b < batch:
            h, first_query = place_in(b, int32(int32(t) - before), tiles, arrays, strides, sizes)
        return b, h, first_query

    return find
