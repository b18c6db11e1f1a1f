"""The tile that a block of a wgmma backward owns and the tiles of the other side it loops over, as words for its roles;
and the order in which these visit query tiles, for each query head of the group.

A block that owns keys processes all query heads of a group, or with config.members so many of them. The last tile of
a head comes first, and the heads follow each other. With config.bidirectional the word STEP gives the direction, and
each tile of all heads comes before the next tile.

Under a mask_mod only tiles in which some key is seen are visited. The producer's threads and the consumers each find
them from the same words, so they agree. The next head's own mask_mod may leave out others.
"""

from numba import int32

from ..score import longest_first, reads, tile_walk
from ..steps import tile_numbers
from ..steps.basics import divide, inlined, named, part_of, parts_of
from ..steps.head_rounds import bias_of_entries, entry_and_head, heads_of_round, in_rounds
from ..steps.sequence import key_range, make as make_sequence, query_range
from . import block
from .block import BEGIN, FIRST_ROW, MEMBERS, STEP, STOP, B, H, WorkTile


def of_keys(config):
    """-> device functions of a block that owns a key tile, for one thread; `behind` for any."""
    all_keys = config.key_tiles > 0
    state, sequence_of = block.state_of(config), make_sequence(config)
    has_mask, ranges_of = config.has("mask"), reads.make(config, 1, config.tile_m, of_keys=True).ranges
    order = longest_first.make(config)
    in_line = has_mask and config.bidirectional and not all_keys  # the block has turns
    bias_of_all, write_places = bias_of_entries(config), block.places(config).write
    numbers = tile_numbers.make(config, config.tile_n, True) if config.packed else None

    @inlined
    def head_parts_of(sizes):
        """The number of parts of all groups of a batch entry."""
        parts = parts_of(divide(sizes.heads, sizes.heads_kv), int32(config.members))
        return int32(int32(sizes.heads_kv) * parts)

    @inlined
    def kv_head_of(part, sizes):
        return divide(part, parts_of(divide(sizes.heads, sizes.heads_kv), int32(config.members)))

    @inlined
    def tile_of(number, arrays, strides, sizes):
        """-> (b, part of all groups, first_key). The first keys of some heads come first: under a causal mask the most
        queries see them."""
        seqlen_k, head_parts = sizes.seqlen_k, head_parts_of(sizes)
        if config.packed:  # of one head after the other
            n_tiles = numbers.count(sizes)
            part = divide(number, n_tiles)
            b, first_key = numbers.at(int32(number - part * n_tiles), arrays, strides, sizes)
            return b, part, first_key
        if order.present:  # the key tiles that the most query tiles see come first
            b, h_kv, own = order.take(number, arrays, strides, sizes)
            return b, h_kv, int32(own * config.tile_n)
        n_tiles = divide(int32(seqlen_k) + int32(config.tile_n - 1), config.tile_n)
        all_parts = int32(int32(sizes.batch) * head_parts)
        at_once = heads_of_round(n_tiles, sizes.right < seqlen_k)
        part_of_all, rank = in_rounds(int32(number), n_tiles, all_parts, at_once)
        b, part = entry_and_head(part_of_all, sizes.batch, head_parts, bias_of_all(strides))
        return b, part, int32(rank * config.tile_n)

    @inlined
    def write_tile(base, sequence, head_part, first_key, arrays, strides, sizes):
        """Writes the words of the block's work, of a given tile."""
        group = int32(divide(sizes.heads, sizes.heads_kv))
        parts = parts_of(group, int32(config.members))
        h_kv, first_head, members = part_of(head_part, parts, group, int32(config.members))
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
            begin, stop = 0, divide(int32(sequence.seqlen_q) + int32(config.tile_m - 1), config.tile_m)
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
        b, part, first_key = tile_of(number, arrays, strides, sizes)
        write_tile(base, sequence_of(b, arrays, strides, sizes), part, first_key, arrays, strides, sizes)

    @inlined
    def behind(number, arrays, strides, sizes):
        """Whether its tile is behind its packed sequence's keys."""
        b, _, first_key = tile_of(number, arrays, strides, sizes)
        return first_key < 0 or first_key >= sequence_of(b, arrays, strides, sizes).keys

    return named(head_parts_of, kv_head_of, write, write_tile, behind)


def of_queries(config):
    """-> the same for a block that owns a query tile and loops over key tiles."""
    state, sequence_of = block.state_of(config), make_sequence(config)
    has_mask, ranges_of = config.has("mask"), reads.make(config, 1, config.tile_n).ranges
    of_thread = tile_walk.make(config)
    take, bias_of_all = longest_first.make(config).take, bias_of_entries(config)
    write_places = block.places(config).write
    numbers = tile_numbers.make(config, config.tile_m, False) if config.packed else None

    @inlined
    def tile_of(number, arrays, strides, sizes):
        """-> (b, h, first_query). The last queries of some heads come first: under a causal mask they see the most
        keys."""
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        if config.packed:  # of one head after the other
            m_tiles = numbers.count(sizes)
            h = divide(number, m_tiles)
            b, first_query = numbers.at(int32(m_tiles - 1 - (number - h * m_tiles)), arrays, strides, sizes)
            return b, h, first_query
        if of_thread.present:  # the query tiles that see the most key tiles come first
            b, h, own = take(number, arrays, strides, sizes)
            return b, h, int32(own * config.tile_m)
        m_tiles = divide(int32(seqlen_q) + int32(config.tile_m - 1), config.tile_m)
        all_heads = int32(sizes.batch * heads)
        at_once = heads_of_round(m_tiles, sizes.right < sizes.seqlen_k)
        head_of_all, rank = in_rounds(int32(number), m_tiles, all_heads, at_once)
        b, h = entry_and_head(head_of_all, sizes.batch, heads, bias_of_all(strides))
        return b, h, int32((m_tiles - 1 - rank) * config.tile_m)

    @inlined
    def write(base, number, arrays, strides, sizes):
        """Writes the words of a block's work."""
        b, h, first_query = tile_of(number, arrays, strides, sizes)
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

    @inlined
    def behind(number, arrays, strides, sizes):
        """Whether its tile is behind its packed sequence's queries."""
        b, _, first_query = tile_of(number, arrays, strides, sizes)
        return first_query < 0 or first_query >= sequence_of(b, arrays, strides, sizes).seqlen_q

    return named(write, behind)


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
        """Of tile i; False if no tile is left."""
        if not walk.present:
            return walk.needs_mask(int32(0), i, arrays, strides)
        asks = False
        if member < word(work, MEMBERS):
            asks = walk.needs_mask(states_of(work, member, arrays, strides), i, arrays, strides)
        return asks

    return named(first, more, needs_mask, next=following, present=walk.present)
