"""The query tile that a block of a wgmma backward owns and the key tiles it loops over, as words for its roles."""

from numba import int32

from ..score import longest_first, reads, tile_walk
from ..steps import tile_numbers
from ..steps.head_rounds import bias_of_entries, entry_and_head, heads_of_round, in_rounds
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.named import named
from ..steps.sequence import key_range
from ..steps.sequence import make as make_sequence
from . import block
from .block import POS_CUT, POS_FREE, STATES, WorkTile, shown_range


def make(config):
    """-> device functions for one thread; `behind` for any."""
    state, sequence_of = block.state_of(config), make_sequence(config)
    has_mask, ranges_of = config.has("mask"), reads.make(config, 1, config.tile_n).ranges
    of_thread = tile_walk.make(config)
    take, bias_of_all = longest_first.make(config).take, bias_of_entries(config)
    write_places = block.places(config).write
    numbers = tile_numbers.make(config, config.tile_m, False) if config.packed else None

    @inlined
    def tile_of(block, arrays, strides, sizes):
        """-> (b, h, first_query). The last queries of some heads come first: under a causal mask they see the most
        keys."""
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        if config.packed:  # of one head after the other
            m_tiles = numbers.count(sizes)
            h = divide(block, m_tiles)
            b, first_query = numbers.at(int32(m_tiles - 1 - (block - h * m_tiles)), arrays, strides, sizes)
            return b, h, first_query
        if of_thread.present:  # the query tiles that see the most key tiles come first
            b, h, own = take(block, arrays, strides, sizes)
            return b, h, int32(own * config.tile_m)
        m_tiles = divide(int32(seqlen_q) + int32(config.tile_m - 1), config.tile_m)
        all_heads = int32(sizes.batch * heads)
        at_once = heads_of_round(m_tiles, sizes.right < sizes.seqlen_k)
        head_of_all, rank = in_rounds(int32(block), m_tiles, all_heads, at_once)
        b, h = entry_and_head(head_of_all, sizes.batch, heads, bias_of_all(strides))
        return b, h, int32((m_tiles - 1 - rank) * config.tile_m)

    @inlined
    def write(base, block, arrays, strides, sizes):
        """Writes the words of a block's work."""
        b, h, first_query = tile_of(block, arrays, strides, sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        last_query = first_query + min(sequence.seqlen_q - first_query, config.tile_m) - 1
        begin, free, cut, stop = key_range(sequence, first_query, last_query, sizes, config.tile_n)
        if has_mask:  # leave out the key tiles before the first and after the last in which the mask leaves a key
            state.write(base, POS_FREE, free)
            state.write(base, POS_CUT, cut)
            end_query = min(first_query + config.tile_m, sequence.seqlen_q)
            ranges = ranges_of(b, h, 1, first_query, end_query, arrays, strides, sizes)
            begin, free, cut, stop = shown_range(begin, free, cut, stop, ranges, config.tile_n)
            stop = max(begin, stop)
        if of_thread.present:
            states = of_thread.row(b, h, first_query, arrays, strides)
            begin, stop = of_thread.trim(states, int32(begin), int32(stop), arrays, strides)
            state.write(base, STATES, states)
        h_kv, position = divide(h, divide(sizes.heads, sizes.heads_kv)), first_query + sequence.q_start
        state.write_tile(base, WorkTile(b, h, h_kv, first_query, sequence.keys, position, 1, begin, free, cut, stop))
        write_places(base, sequence)

    @inlined
    def behind(block, arrays, strides, sizes):
        """Whether its tile is behind its packed sequence's queries."""
        b, _, first_query = tile_of(block, arrays, strides, sizes)
        return first_query < 0 or first_query >= sequence_of(b, arrays, strides, sizes).seqlen_q

    return named(write, behind)
