"""How a block of backward_dkdv.py loops over the query tiles that see its keys, for each head of the group.

What every tile needs is stored in shared memory and read again for each tile: in registers it would be kept through the
loop, and take those that S needs. Heads are counted backwards: `heads_left` identifies the current one. i: a query tile
of that head; k_smem: where shared memory begins.
"""

from numba import int32, int64

from ...arrays.dtypes import ITEM_SIZE
from ...ptx import memory
from ..score import fragments, tile_walk
from ..score.gradient_functions import LanePlace
from ..score.reads import Origin
from ..steps import block_state, numbers
from ..steps import sequence as sequences
from ..steps.inlined import TRUE, inlined
from ..steps.integers import divide
from ..steps.named import named
from ..steps.plain import key_queries
from ..steps.sequence import query_row
from . import backward_scores, query_columns
from .work_tile import KeyWork


def make(config):
    tile_m, size, real = config.tile_m, config.item_size, numbers.of(config.compute_dtype).real
    plan, columns, scores = config.shared_layout(), query_columns.make(config), backward_scores.make(config)
    bases_at, heads_at, offset_at, walk_at, tile_at, reads_at = (plan.state + n * block_state.SIZE for n in range(6))
    states, row_term, has_mask = tile_walk.make(config), fragments.chain(config).row_term, config.has("mask")
    bias_item, sequence_again = ITEM_SIZE[config.dtype_of("bias") or "float32"], sequences.again(config)

    @inlined
    def set_up_state(work, begin, stop, free, cut, arrays, strides, sizes, k_smem, thread):
        """Stores what every tile needs. Query tiles [begin, stop) see some of the keys, and [free, cut) all of them."""
        sequence, h_kv, first_key = work
        end_head = (h_kv + 1) * divide(sizes.heads, sizes.heads_kv)
        if thread == 0:
            q_end, do_end = query_row(strides.q, sequence, end_head, 0), query_row(strides.do, sequence, end_head, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            q, do = memory.address(arrays.q, q_end), memory.address(arrays.do, do_end)
            block_state.put(k_smem + int32(bases_at), q, do)
            heads_end = columns.head_at(sequence, end_head, arrays, sizes)
            block_state.put(k_smem + int32(heads_at), heads_end, int64(end_head))
            block_state.put(k_smem + int32(offset_at), sequence.q_start - first_key, sequence.keys)
            block_state.put_range(k_smem + int32(walk_at), begin, stop)
            block_state.put_range(k_smem + int32(walk_at + 8), free, cut)
            b_and_queries = int64(sequence.b)
            if config.packed:
                b_and_queries = int64(sequence.seqlen_q) << 32 | sequence.b
            block_state.put(k_smem + int32(tile_at), b_and_queries, int64(first_key) << 32 | h_kv)
            if scores.read.reads:
                origin = scores.read.origin(sequence.b, end_head, first_key, arrays, strides)
                block_state.put(k_smem + int32(reads_at), origin.bias, origin.bits)
        if thread < config.tile_n:  # the range of queries that see a key
            key = first_key + thread
            first_query, end_query = key_queries(key, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
            end_query = first_query if key >= sequence.keys else end_query
            block_state.put_range(k_smem + int32(plan.seen) + 8 * thread, int32(first_query), int32(end_query))

    @inlined
    def seqlen_q(k_smem, sizes):
        """Of the block's sequence."""
        if config.packed:
            b_and_queries, _ = block_state.get(k_smem + int32(tile_at))
            return b_and_queries >> 32
        return sizes.seqlen_q

    @inlined
    def work_again(k_smem, arrays, strides, sizes):
        """-> KeyWork, from the state of the block."""
        b, tile = block_state.get(k_smem + int32(tile_at))  # b in the lower half
        first_key, h_kv = int32(tile >> 32), int32(tile)
        from_first_key, keys = block_state.get(k_smem + int32(offset_at))
        sequence = sequence_again(int32(b), keys, from_first_key + first_key, arrays, strides, sizes)
        return KeyWork(sequence, h_kv, first_key)

    @inlined
    def head_of(heads_left, k_smem):
        """-> (batch entry, query head)."""
        b, _ = block_state.get(k_smem + int32(tile_at))
        if config.packed:
            b = int64(int32(b))
        _, end_head = block_state.get(k_smem + int32(heads_at))
        return b, end_head - heads_left

    @inlined
    def distances(i, k_smem, distance):
        """q_pos - k_pos of the lane's keys at its first column of query tile i."""
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        query, key = scores.first_column(i), scores.own_row()
        for r in range(config.warp_rows // 8):
            distance[r] = real(int64(query) + from_first_key - (key + r * 8))

    @inlined
    def seen_columns(i, r, k_smem):
        """Bits of those of the lane's columns of query tile i that see its key r."""
        first_query, key = scores.first_column(i), scores.own_row() + r * 8
        first, end = block_state.get_range(k_smem + int32(plan.seen) + 8 * key)
        return scores.within(first_query, first, end)

    @inlined
    def find_kept(i, heads_left, kept, k_smem, arrays, sizes):
        """kept <- which of the lane's weights of query tile i of a head count."""
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        _, tile = block_state.get(k_smem + int32(tile_at))
        first_key, (b, h) = tile >> 32, head_of(heads_left, k_smem)
        first_q_pos = int64(scores.first_column(i)) + from_first_key + first_key
        first_key = first_key + scores.own_row()
        scores.kept_weight.of_keys(kept, first_q_pos, b, h, first_key, arrays, sizes)

    @inlined
    def load_for_scores(i, heads_left, registers, k_smem, arrays, strides, sizes, masked):
        """Loads what the scores of query tile i of a head need from global memory, while they are computed."""
        bias, bits = block_state.get(k_smem + int32(reads_at))
        _, tile = block_state.get(k_smem + int32(tile_at))
        bias = bias - heads_left * (bias_item * strides.bias[1])
        bits = bits - heads_left * (4 * strides.mask_bits_of_keys[1])
        scores.load(i, Origin(bias, bits, int32(tile >> 32)), registers, arrays, strides, sizes, masked)

    @inlined
    def ask_functions(i, heads_left, registers, k_smem, arrays, strides, score):
        """acc_s, acc_dp <- with score_mod and its derivative; shown_bits <- without what any option hides."""
        asks = TRUE
        if states.present:
            asks = states.needs_mask(states_of(heads_left, k_smem, arrays, strides), i, arrays, strides)
        for r in range(config.warp_rows // 8):
            seen = seen_columns(i, r, k_smem)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        _, tile = block_state.get(k_smem + int32(tile_at))
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        first_key, (b, h) = int32(tile >> 32), head_of(heads_left, k_smem)
        first_query, q_start = scores.first_column(i), from_first_key + first_key
        of_lane = LanePlace(b, h, first_query, q_start, int32(first_key + scores.own_row()))
        scores.apply(of_lane, asks, registers, arrays, strides, score)

    @inlined
    def term_of(heads_left, k_smem, arrays, strides):
        """The term that all scores of the head share (kernels/score/fragments.py)."""
        b, h = head_of(heads_left, k_smem)
        return row_term(b, h, arrays, strides)

    @inlined
    def queries_at(i, heads_left, strides, k_smem):
        """The address of Q of query tile i of a head."""
        q_end, _ = block_state.get(k_smem + int32(bases_at))
        return q_end + size * (int32(i * int32(tile_m)) * strides.q[2] - heads_left * strides.q[1])

    @inlined
    def others_at(i, heads_left, strides, sizes, k_smem):
        """The address of dO of query tile i of a head, and where the head's lse and delta begin."""
        _, do_end = block_state.get(k_smem + int32(bases_at))
        heads_end, _ = block_state.get(k_smem + int32(heads_at))
        do_place = do_end + size * (int32(i * int32(tile_m)) * strides.do[2] - heads_left * strides.do[1])
        return do_place, heads_end - heads_left * columns.head_step(sizes)

    @inlined
    def states_of(heads_left, k_smem, arrays, strides):
        """Where the states of the head's tiles begin (kernels/score/tile_walk.py)."""
        _, tile = block_state.get(k_smem + int32(tile_at))
        b, h = head_of(heads_left, k_smem)
        return states.row(b, int32(h), int32(tile >> 32), arrays, strides)

    @inlined
    def from_tile(i, heads_left, k_smem, arrays, strides):
        """-> (i, heads_left) of the first query tile from i on in which a mask_mod leaves something."""
        begin, stop = block_state.get_range(k_smem + int32(walk_at))
        found = states.first(states_of(heads_left, k_smem, arrays, strides), i, stop, arrays, strides)
        while found >= stop and heads_left > 0:
            heads_left = int32(heads_left - 1)
            if heads_left > 0:
                found = states.first(states_of(heads_left, k_smem, arrays, strides), begin, stop, arrays, strides)
        return found, heads_left

    @inlined
    def following(i, heads_left, k_smem, arrays, strides):
        """-> (i, heads_left) of the next query tile: after the last one, the first one of the next head."""
        if states.present:
            return from_tile(int32(i + 1), heads_left, k_smem, arrays, strides)
        begin, stop = block_state.get_range(k_smem + int32(walk_at))
        last = int32(i + 1) == stop
        return begin if last else int32(i + 1), int32(heads_left - 1) if last else heads_left

    @inlined
    def is_unmasked(i, heads_left, k_smem, arrays, strides):
        """Whether every query of tile i sees every key of the block, and the tile has code of its own for that."""
        if scores.always_masked:
            return False
        free, cut = block_state.get_range(k_smem + int32(walk_at + 8))
        whole = i >= free and i < cut
        if states.present:
            if whole and heads_left > 0:
                whole = not states.needs_mask(states_of(heads_left, k_smem, arrays, strides), i, arrays, strides)
        return whole

    return named(
        set_up_state, seqlen_q, work_again, distances, seen_columns, find_kept, load_for_scores, ask_functions, term_of,
        queries_at, others_at, from_tile, following, is_unmasked,
    )  # fmt: skip
