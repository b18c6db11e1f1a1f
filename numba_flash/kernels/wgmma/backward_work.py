"""The tile that a block of a wgmma backward owns and the tiles of the other side it loops over, as words for its roles;
and the order in which these visit query tiles, for each query head of the group.

A block that owns keys processes all query heads of a group, or with config.members so many of them. The last tile of
a head comes first, and the heads follow each other. With config.bidirectional the word STEP gives the direction, and
each tile of all heads comes before the next tile.

Under a mask_mod only tiles in which some key is seen are visited. The producer's threads and the consumers each find
them from the same words, so they agree. The next head's own mask_mod may leave out others.
"""

from typing import NamedTuple

from numba import int32

from ..score import longest_first, reads, tile_walk
from ..steps import tile_numbers
from ..steps.basics import divide, inlined, members_of, named, part_of, parts_of, tiles_of
from ..steps.head_rounds import bias_of_entries, entry_and_head, heads_of_round, in_rounds
from ..steps.sequence import key_range, make as make_sequence, query_range
from . import block
from .block import BEGIN, FIRST_ROW, MEMBERS, STEP, STOP, B, H, WorkTile


class Step(NamedTuple):
    """A step of a block's loop over tiles."""

    n: int  # number of steps before this one
    i: int  # index of the tile
    member: int  # index of the head in its group


@inlined
def head_parts_of(sizes, members):
    """The number of parts of all groups of a batch entry. members: config.members."""
    return int32(int32(sizes.heads_kv) * parts_of(divide(sizes.heads, sizes.heads_kv), int32(members)))


@inlined
def kv_head_of(part, sizes, members):
    return divide(part, parts_of(divide(sizes.heads, sizes.heads_kv), int32(members)))


def tiles(config):
    """-> device functions. at: (b, head, first row) of a block's own tile, from its number; head: of queries, or of
    keys the part of all groups. behind: whether the tile is behind its packed sequence's rows.

    Tiles of some heads follow each other: first keys or last queries first, because under a causal mask the most
    queries see those, and these see the most keys. Under a mask_mod those with the most tiles to loop over come first.
    """
    of_keys, rows, sequence_of = config.of_keys, config.own_rows, make_sequence(config)
    order, bias_of_all = longest_first.make(config), bias_of_entries(config)
    members = config.members if of_keys else 0
    numbers = tile_numbers.make(config, rows, of_keys) if config.packed else None

    @inlined
    def at(number, arrays, strides, sizes):
        heads = head_parts_of(sizes, members) if of_keys else sizes.heads
        if config.packed:  # of one head after the other
            count = numbers.count(sizes)
            head = divide(number, count)
            rank = number - head * count
            b, first_row = numbers.at(int32(rank if of_keys else count - 1 - rank), arrays, strides, sizes)
            return b, head, first_row
        if order.present:
            b, head, own = order.take(number, arrays, strides, sizes)
            return b, head, int32(own * rows)
        count = tiles_of(sizes.seqlen_k if of_keys else sizes.seqlen_q, rows)
        at_once = heads_of_round(count, sizes.right < sizes.seqlen_k)
        head_of_all, rank = in_rounds(int32(number), count, int32(sizes.batch * heads), at_once)
        b, head = entry_and_head(head_of_all, sizes.batch, heads, bias_of_all(strides))
        return b, head, int32((rank if of_keys else count - 1 - rank) * rows)

    @inlined
    def rows_of(b, arrays, strides, sizes):
        sequence = sequence_of(b, arrays, strides, sizes)
        return sequence.keys if of_keys else sequence.seqlen_q

    @inlined
    def behind(number, arrays, strides, sizes):
        b, _, first_row = at(number, arrays, strides, sizes)
        return first_row < 0 or first_row >= rows_of(b, arrays, strides, sizes)

    return named(at, behind)


def of_keys(config):
    """-> device functions of a block that owns a key tile, for one thread."""
    all_keys = config.key_tiles > 0
    state, sequence_of, tile_at = block.state_of(config), make_sequence(config), tiles(config).at
    has_mask, ranges_of = config.has("mask"), reads.make(config, 1, config.tile_m, of_keys=True).ranges
    in_line = has_mask and config.bidirectional and not all_keys  # the block has turns
    write_places = block.places(config).write

    @inlined
    def write_tile(base, sequence, head_part, first_key, arrays, strides, sizes):
        """Writes the words of the block's work, of a given tile."""
        group, members = int32(divide(sizes.heads, sizes.heads_kv)), int32(config.members)
        if config.packed:
            members = int32(members_of(members, sequence.keys))
        h_kv, first_head, members = part_of(head_part, parts_of(group, members), group, members)
        keys_left = min(sequence.keys - first_key, config.tile_n)
        begin, free, cut, stop = query_range(sequence, first_key, first_key + keys_left - 1, sizes, config.tile_m)
        if in_line:
            state.write(base, block.LINE_BEGIN, begin)
            state.write(base, block.LINE_STOP, begin if keys_left <= 0 else stop)
        if has_mask:  # leave out the query tiles before the first and after the last in which the mask leaves a key
            if not config.bidirectional:
                state.write(base, block.POS_FREE, free)
                state.write(base, block.POS_CUT, cut)
            end_key = first_key + max(keys_left, 1)
            ranges = ranges_of(sequence.b, first_head, members, first_key, end_key, arrays, strides, sizes)
            begin, free, cut, stop = block.shown_range(begin, free, cut, stop, ranges, config.tile_m)
            if in_line:
                stop = max(begin, stop)
        if all_keys:  # dQ of queries that see no key is written, too
            begin, stop = 0, tiles_of(sequence.seqlen_q, config.tile_m)
        elif keys_left <= 0:
            stop = begin
        position = first_key - sequence.q_start
        keys = sequence.keys
        tile = WorkTile(sequence.b, first_head, h_kv, first_key, keys, position, members, begin, free, cut, stop)
        state.write_tile(base, tile)
        state.write(base, block.PART, head_part)
        write_places(base, sequence)

    @inlined
    def write(base, number, arrays, strides, sizes):
        b, part, first_key = tile_at(number, arrays, strides, sizes)
        write_tile(base, sequence_of(b, arrays, strides, sizes), part, first_key, arrays, strides, sizes)

    return named(write, write_tile)


def of_queries(config):
    """-> the same of a block that owns a query tile and loops over key tiles."""
    state, sequence_of, tile_at = block.state_of(config), make_sequence(config), tiles(config).at
    has_mask, ranges_of = config.has("mask"), reads.make(config, 1, config.tile_n).ranges
    of_thread, write_places = tile_walk.make(config), block.places(config).write

    @inlined
    def write(base, number, arrays, strides, sizes):
        """Writes the words of a block's work."""
        b, h, first_query = tile_at(number, arrays, strides, sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        last_query = first_query + min(sequence.seqlen_q - first_query, config.tile_m) - 1
        begin, free, cut, stop = key_range(sequence, first_query, last_query, sizes, config.tile_n)
        if has_mask:  # leave out the key tiles before the first and after the last in which the mask leaves a key
            state.write(base, block.POS_FREE, free)
            state.write(base, block.POS_CUT, cut)
            end_query = min(first_query + config.tile_m, sequence.seqlen_q)
            ranges = ranges_of(b, h, 1, first_query, end_query, arrays, strides, sizes)
            begin, free, cut, stop = block.shown_range(begin, free, cut, stop, ranges, config.tile_n)
            stop = max(begin, stop)
        if of_thread.present:
            states = of_thread.row(b, h, first_query, arrays, strides)
            begin, stop = of_thread.trim(states, int32(begin), int32(stop), arrays, strides)
            state.write(base, block.STATES, states)
        h_kv, position = divide(h, divide(sizes.heads, sizes.heads_kv)), first_query + sequence.q_start
        state.write_tile(base, WorkTile(b, h, h_kv, first_query, sequence.keys, position, 1, begin, free, cut, stop))
        write_places(base, sequence)

    return named(write)


@inlined
def first_tile(begin, stop, step):
    return int32(stop - 1 if step < 0 else begin)


@inlined
def following_tile(i, member, step, members):
    """-> (i, member) with config.bidirectional. Blocks that are some tiles apart stay so, even if some have more tiles
    than others."""
    member = int32(member + 1)
    if member == members:
        i, member = int32(i + step), int32(0)
    return i, member


def query_walk(config, whole_warp):
    """-> device functions. work: where the words are; i: the query tile; member: index of the head in its group, the
    number of heads when no tile is left. present: whether tiles in which nothing is seen are left out. whole_warp: all
    lanes of a warp call these functions together, and the compiler may rely on it."""
    walk, bidirectional = tile_walk.make(config, whole_warp), config.bidirectional
    word = block.state_of(config).read if whole_warp else block.state_of(config).read_alone

    @inlined
    def states_of(work, member, arrays, strides):
        if not walk.present:
            return int32(0)
        return walk.row(word(work, B), int32(word(work, H) + member), word(work, FIRST_ROW), arrays, strides)

    @inlined
    def up_to(work, i, member, arrays, strides):
        """-> the first tile from i on in which something is seen."""
        begin, members = word(work, BEGIN), word(work, MEMBERS)
        found = walk.last(states_of(work, member, arrays, strides), i, begin, arrays, strides)
        while found < begin and member < members:
            member = int32(member + 1)
            if member < members:
                states = states_of(work, member, arrays, strides)
                found = walk.last(states, int32(word(work, STOP) - 1), begin, arrays, strides)
        return found, member

    @inlined
    def first(work, arrays, strides):
        if bidirectional:
            i = first_tile(word(work, BEGIN), word(work, STOP), word(work, STEP))
        else:
            i = int32(word(work, STOP) - 1)
        member = int32(0)
        if walk.present:
            i, member = up_to(work, i, member, arrays, strides)
        return i, member

    @inlined
    def more(work, i, member):
        return member < word(work, MEMBERS) and word(work, BEGIN) <= i < word(work, STOP)

    @inlined
    def following(work, i, member, arrays, strides):
        if bidirectional:
            i, member = following_tile(i, member, word(work, STEP), word(work, MEMBERS))
        elif walk.present:
            i, member = up_to(work, int32(i - 1), member, arrays, strides)
        else:
            i = int32(i - 1)
            if i < word(work, BEGIN):
                i, member = int32(word(work, STOP) - 1), int32(member + 1)
        return i, member

    @inlined
    def needs_mask(work, i, member, arrays, strides):
        """Whether mask_mod decides in tile i; False if no tile is left."""
        if not walk.present:
            return walk.needs_mask(int32(0), i, arrays, strides)
        asks = False
        if member < word(work, MEMBERS):
            asks = walk.needs_mask(states_of(work, member, arrays, strides), i, arrays, strides)
        return asks

    @inlined
    def steps(work):
        """The number of tiles of all heads, if none is left out."""
        return int32(word(work, MEMBERS) * (word(work, STOP) - word(work, BEGIN)))

    @inlined
    def first_step(work, arrays, strides):
        i, member = first(work, arrays, strides)
        return Step(int32(0), i, member)

    @inlined
    def next_step(work, step, arrays, strides):
        i, member = following(work, step.i, step.member, arrays, strides)
        return Step(int32(step.n + 1), i, member)

    functions = first, more, needs_mask, steps, first_step, next_step
    return named(*functions, next=following, present=walk.present)
