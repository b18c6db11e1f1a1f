"""Which query tiles of packed sequences a block takes: of one sequence after the other, of each the last queries first.

Only tiles that exist have a number, whatever max_seqlen_q says: no role meets a tile behind a sequence's end. The
numbers of a block's tiles rise, so its scheduler looks for the next one from the sequence of the last one on.
"""

from collections.abc import Callable
from typing import Any

from numba import int32

from ..steps.head_rounds import in_rounds
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import make as make_sequence
from ..steps.sequence import queries as make_queries
from .block import BEFORE, SEQUENCE, word_alone, write


def make(config: Any, heads_at_once: Any, work_tile: Callable[..., Any]) -> Callable[..., Any]:
    """-> find(base, i, t, arrays, strides, sizes) -> (b, h, first_query) of query tile t, the block's i-th; b = batch:
    none is left. heads_at_once(keys, heads, sizes); work_tile(base, i): where the block's i-th tile is described."""
    rows, sequence_of, queries_of = config.queries, make_sequence(config), make_queries(config)

    @inlined
    def tiles_of_head(b, arrays, strides, sizes):
        return divide(int32(queries_of(b, arrays, strides, sizes).seqlen_q) + int32(rows - 1), rows)

    @inlined
    def find(base, i, t, arrays, strides, sizes):
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
        h, first_query = int32(0), int32(0)
        if b < batch:
            keys = int32(sequence_of(b, arrays, strides, sizes).keys)
            h, from_last = in_rounds(int32(int32(t) - before), tiles, heads, heads_at_once(keys, heads, sizes))
            first_query = int32((tiles - 1 - from_last) * rows)
        return b, int32(h), first_query

    return find
