"""Finds the tiles in which a mask_mod leaves nothing, some, or all of what can be seen. Runs before the attention
kernel.

A tile in which nothing is seen can be left out, and a tile in which all is seen needs no mask_mod. Scores are not
stored: a tile has two bits. mask_mod is called only for positions that causal, window, lengths and mask leave, so "all"
means all of those. Elsewhere the function might read past the end of an array.

A query tile has a row of words (abi/tile_states.py), each for STATES_IN_WORD key tiles, and after them a word that
tile_order.py writes. Bit i says that something is seen in the i-th of a word's tiles. Bit 16 + i says that something is
seen and something is not, so that mask_mod must be called again. If a tile has rows of several heads, what is seen for
one of them counts as seen. For kernels that own keys and loop over queries, a key tile has a row of words instead, each
for query tiles.

    own tile's first word = b * strides[0] + h // heads of a tile * strides[1] + own tile * strides[2]

A warp examines a tile. First it asks between which numbers the function lies there (tile_bounds.py), which decides in
most tiles. In others it calls the function until it has found both. Launch: grid (words), block (config.threads).
"""

from numba import cuda, int32, int64, uint32

from ...abi.parameters import STATES_IN_WORD
from ...ptx import special, vote
from ..steps import sequence
from ..steps.basics import divide, inlined, key_queries, row_keys, tiles_of
from . import at_position, mask, tile_bounds, tile_walk, user

ROWS = 8  # for which a warp calls the function before it asks whether it has found both


def make(config):
    queries, tile_n, heads, of_keys = config.tile
    own_rows, warps = config.tile.own, config.threads // 32
    sequence_of, states_of = sequence.make(config), tile_walk.states_of(config)
    visible, has_mask = user.make(config, "mask_mod"), config.has("mask")
    shown_by_mask, bounds = mask.make(config), tile_bounds.make(config)
    has_bounds = bounds is not None

    @inlined
    def look_at_rows(b, h, first_query, end_query, step, first_key, end_key, q_start, lane, arrays, strides, sizes):
        """-> (whether some key is seen, whether some is not), for every step-th query, ROWS at most, by one lane."""
        seen, hidden = uint32(0), uint32(0)
        key = int32(first_key + lane)
        while key < end_key:
            first_, end_ = key_queries(int64(key), q_start, sizes.left, sizes.right, int64(end_query))
            first, end = int32(first_), int32(end_)
            for n in range(ROWS):
                query = int32(first_query + n * step)
                here = at_position(b, h, query, key, query + q_start)
                counts = first <= query and query < end
                if has_mask:
                    counts = counts and shown_by_mask(here, arrays, strides)
                if counts:
                    if visible(here, arrays, strides):
                        seen = uint32(1)
                    else:
                        hidden = uint32(1)
            key = int32(key + 32)
        return seen, hidden

    @inlined
    def look_at_tile(j, b, h, members, first_query, end_query, lane, arrays, strides, sizes):
        """Likewise for key tile j and the queries [first_query, end_query) of `members` heads from h on, by a warp."""
        keys, q_start = sequence_of(b, arrays, strides, sizes)[2:4]
        first_key, _ = row_keys(first_query + q_start, sizes.left, sizes.right, keys)
        _, end_key = row_keys(end_query - 1 + q_start, sizes.left, sizes.right, keys)
        first_key, end_key = int32(max(first_key, j * tile_n)), int32(min(end_key, (j + 1) * tile_n))
        seen, hidden = uint32(0), uint32(0)
        asks = first_query < end_query and first_key < end_key
        if has_bounds and asks:
            of_heads, of_rows = (int64(h), int64(h + members - 1)), (int64(first_query), int64(end_query - 1))
            of_queries, of_keys = (of_rows[0] + q_start, of_rows[1] + q_start), (int64(first_key), int64(end_key - 1))
            truth = bounds((int64(b), int64(b)), of_heads, of_queries, of_keys, of_rows, arrays, strides, lane)
            if tile_bounds.never(truth):
                asks, hidden = False, uint32(1)
            elif tile_bounds.always(truth) and not has_mask:
                asks, seen = False, uint32(1)
        # Queries from all parts of the tile come first: most tiles that have both show it there.
        step, member = tiles_of(queries, ROWS), int32(0)
        while asks and member < members:
            first, here = int32(first_query), int32(h + member)
            while first < int32(first_query) + step:
                rows, keys_here = (first, int32(end_query), step), (first_key, end_key)
                found = look_at_rows(b, here, *rows, *keys_here, q_start, lane, arrays, strides, sizes)
                seen, hidden = vote.any_lane(seen | found[0]), vote.any_lane(hidden | found[1])
                first = int32(first + 1)
                if seen & hidden != 0:  # nothing can change the result
                    asks, first = False, int32(first_query + step)
            member = int32(member + 1)
        return seen, hidden

    @inlined
    def is_visited(j, b, first_query, end_query, arrays, strides, sizes):
        """Whether a kernel visits the tile; it does not ask about other tiles."""
        own = sequence_of(b, arrays, strides, sizes)
        begin, _, _, end = sequence.key_range(own, first_query, end_query - 1, sizes, tile_n)
        return begin <= j and j < end

    @cuda.jit
    def tile_states(arrays, strides, sizes):
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        states, by = states_of(arrays, strides)
        own_tiles = tiles_of(sizes.seqlen_k if of_keys else sizes.seqlen_q, own_rows)
        groups = divide(sizes.heads, heads) if by[1] != 0 else int32(1)
        members = int32(heads) if by[1] != 0 else int32(1)  # otherwise all heads see the same
        words = int32(by[2] - 1)
        row = divide(special.block_index(), words)
        head_row = divide(row, own_tiles)
        b = divide(head_row, groups)
        h = int32((head_row - b * groups) * heads)
        own = int32(row - head_row * own_tiles)
        number = int32(special.block_index() - row * words)
        first_tile = int32(number * STATES_IN_WORD)

        found = cuda.shared.array(STATES_IN_WORD, uint32)
        for place in range(warp, STATES_IN_WORD, warps):
            i, j = own, int32(first_tile + place)
            if of_keys:
                i, j = int32(first_tile + place), own
            first_query = int32(i * queries)
            end_query = min(int32(first_query + queries), int32(sizes.seqlen_q))
            seen, hidden = uint32(0), uint32(0)
            if is_visited(j, b, first_query, end_query, arrays, strides, sizes):
                seen, hidden = look_at_tile(j, b, h, members, first_query, end_query, lane, arrays, strides, sizes)
            if lane == 0:
                found[place] = (seen | (seen & hidden) << uint32(16)) << uint32(place)
        cuda.syncthreads()
        if thread == 0:
            word = uint32(0)
            for place in range(STATES_IN_WORD):
                word |= found[place]
            states[row * by[2] + number] = word

    return tile_states
