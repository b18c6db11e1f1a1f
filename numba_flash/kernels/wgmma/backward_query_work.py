"""The query tile that a block of a wgmma backward owns and the key tiles it loops over, as words for its roles."""

from numba import int32

from ...ptx import special
from ..score import longest_first, tile_walk
from ..score import reads as score_reads
from ..steps.head_rounds import bias_of_entries, entry_and_head, heads_of_round, in_rounds
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.sequence import key_range
from ..steps.sequence import make as make_sequence
from . import backward_state
from .backward_state import BATCH, BEGIN, CUT, FIRST_ROW, FREE, HEAD, HEAD_KV, KEYS, POS_CUT, POS_FREE, STATES, STOP


def make(config):
    """-> set_up(base, arrays, strides, sizes), a device function for one thread."""
    tile_m, tile_n, block_index = config.tile_m, config.tile_n, special.block_index
    blocks = config.cluster  # number of blocks that own the same queries
    put, put_position, _, _ = backward_state.words(config)
    sequence_of = make_sequence(config)
    has_mask, ranges_of = config.has("mask"), score_reads.make(config, 1, tile_n).ranges
    of_thread = tile_walk.make(config)
    take, bias_of_all = longest_first.make(config).take, bias_of_entries(config)

    @inlined
    def work_of(block, arrays, strides, sizes):
        """-> (b, h, first_query). The last queries of some heads come first: under a causal mask they see the most
        keys."""
        heads, seqlen_q = sizes.heads, sizes.seqlen_q
        if of_thread.present:  # the query tiles that see the most key tiles come first
            b, h, own = take(block, arrays, strides, sizes)
            return b, h, int32(own * tile_m)
        m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
        all_heads = int32(sizes.batch * heads)
        at_once = heads_of_round(m_tiles, sizes.right < sizes.seqlen_k)
        head_of_all, rank = in_rounds(int32(block), m_tiles, all_heads, at_once)
        b, h = entry_and_head(head_of_all, sizes.batch, heads, bias_of_all(strides))
        return b, h, int32((m_tiles - 1 - rank) * tile_m)

    @inlined
    def set_up(base, arrays, strides, sizes):
        b, h, first_query = work_of(divide(block_index(), blocks), arrays, strides, sizes)
        sequence = sequence_of(b, arrays, strides, sizes)
        last_query = first_query + min(sequence.seqlen_q - first_query, tile_m) - 1
        begin, free, cut, stop = key_range(sequence, first_query, last_query, sizes, tile_n)
        if has_mask:  # leave out the key tiles before the first and after the last in which the mask shows a key
            put(base, POS_FREE, free)
            put(base, POS_CUT, cut)
            end_query = min(first_query + tile_m, sequence.seqlen_q)
            ranges = ranges_of(b, h, 1, first_query, end_query, arrays, strides, sizes)
            first, end, whole_first, whole_end = ranges
            begin, stop = max(begin, divide(first, tile_n)), min(stop, divide(end + int32(tile_n - 1), tile_n))
            stop = max(begin, stop)
            free, cut = max(free, divide(whole_first + int32(tile_n - 1), tile_n)), min(cut, divide(whole_end, tile_n))
        if of_thread.present:
            states = of_thread.row(b, h, first_query, arrays, strides)
            begin, stop = of_thread.trim(states, int32(begin), int32(stop), arrays, strides)
            put(base, STATES, states)
        put(base, BATCH, b)
        put(base, HEAD, h)
        put(base, HEAD_KV, divide(h, divide(sizes.heads, sizes.heads_kv)))
        put(base, FIRST_ROW, first_query)
        put(base, KEYS, sequence.keys)
        put(base, BEGIN, begin)
        put(base, FREE, free)
        put(base, CUT, cut)
        put(base, STOP, stop)
        put_position(base, first_query + sequence.q_start)

    return set_up
