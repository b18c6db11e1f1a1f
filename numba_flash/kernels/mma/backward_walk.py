"""How a block of backward_dkdv.py loops over the query tiles that see its keys, for each head of the group.

What every tile needs is stored in shared memory and read again for each tile: in registers it would be kept through the
loop, and take those that S needs. Heads are counted backwards: `heads_left` identifies the current one.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import float32, int32, int64

from ...arrays.dtypes import ITEM_SIZE
from ...ptx import memory, special
from ..score import fragments, gradient_functions, kept_weights, tile_walk
from ..score import reads as score_reads
from ..score.fragments import columns_within
from ..score.reads import Origin
from ..steps import block_state, lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of, key_queries
from ..steps.sequence import Sequence, query_row
from .work_tile import KeyWork


class Walk(NamedTuple):
    """Device functions. i: a query tile of the head given by `heads_left`; k_smem: where shared memory begins."""

    set_up_state: Callable[..., Any]
    work_again: Callable[..., Any]
    distances: Callable[..., Any]
    seen_columns: Callable[..., Any]
    find_kept: Callable[..., Any]
    load_for_scores: Callable[..., Any]
    ask_functions: Callable[..., Any]
    term_of: Callable[..., Any]
    queries_at: Callable[..., Any]
    others_at: Callable[..., Any]
    from_tile: Callable[..., Any]
    following: Callable[..., Any]
    is_unmasked: Callable[..., Any]
    origin_at: Callable[..., Any]


def make(config):
    tile_m, tile_n, warp_rows, rows = config.tile_m, config.tile_n, config.warp_rows, config.warp_rows // 8
    groups, shift = config.column_groups, config.column_groups.bit_length() - 1
    part = tile_m // groups  # queries of a tile for which a warp computes scores
    plan = config.shared_layout()
    bases_at, lse_delta_at, offset_at, walk_at, tile_at, reads_at = (
        plan.state + n * block_state.SIZE for n in range(6)
    )
    read, row_term = score_reads.make(config, warp_rows // 16, part, of_keys=True), fragments.chain(config).row_term
    reads, origin_of, bias_item = read.reads, read.origin, ITEM_SIZE[config.dtype_of("bias") or "float32"]
    load_reads, has_mask, has_score_mod = read.load, config.has("mask"), config.has("score_mod")
    of_states = tile_walk.make(config)
    has_states, states_row, first_tile, needs_mask = (
        of_states.present,
        of_states.row,
        of_states.first,
        of_states.needs_mask,
    )
    apply_functions = gradient_functions.on_fragments(config, warp_rows // 16, part, True, derivative=config.of_dk)
    row_blocks, block_words = lse_delta.row_blocks, lse_delta.BLOCK_WORDS
    kept_of = kept_weights.on_fragments(config, warp_rows // 16, part).of_keys

    @inlined
    def first_query_of(lane, warp):
        """The lane's first column of scores, counted from the beginning of the query tile."""
        return int32(first_column_of(lane)) + (warp & (groups - 1)) * part

    @inlined
    def set_up_state(work, walk, arrays, strides, sizes, k_smem, thread):
        """Stores what every tile needs. Heads are counted backwards: `heads_left` identifies the current one."""
        sequence, h_kv, first_key = work
        end_head = (h_kv + 1) * divide(sizes.heads, sizes.heads_kv)
        if thread == 0:
            q_end, do_end = query_row(strides.q, sequence, end_head, 0), query_row(strides.do, sequence, end_head, 0)
            # Addresses: pointers are parameters and would be kept in registers through the loop.
            block_state.put(
                k_smem + int32(bases_at), memory.address(arrays.q, q_end), memory.address(arrays.do, do_end)
            )
            lse_delta_end = lse_delta.head_blocks(sequence, end_head, sizes)
            block_state.put(
                k_smem + int32(lse_delta_at), memory.address(arrays.lse_delta, lse_delta_end), int64(end_head)
            )
            block_state.put(k_smem + int32(offset_at), sequence.q_start - first_key, sequence.keys)
            block_state.put_range(k_smem + int32(walk_at), walk[0], walk[1])
            block_state.put_range(k_smem + int32(walk_at + 8), walk[2], walk[3])
            block_state.put(k_smem + int32(tile_at), int64(sequence.b), int64(first_key) << 32 | h_kv)
            if reads:
                origin = origin_of(sequence.b, end_head, first_key, arrays, strides)
                block_state.put(k_smem + int32(reads_at), origin.bias, origin.bits)
        if thread < tile_n:  # the range of queries that see a key
            key = first_key + thread
            first_query, end_query = key_queries(key, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
            end_query = first_query if key >= sequence.keys else end_query
            block_state.put_range(k_smem + int32(plan.seen) + 8 * thread, int32(first_query), int32(end_query))

    @inlined
    def distances(i, thread, k_smem, distance):
        """q_pos - k_pos of the lane's keys at its first column of query tile i."""
        lane, warp = thread & int32(31), thread >> int32(5)
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        for r in range(rows):
            key = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
            distance[r] = float32(int64(i) * tile_m + first_query_of(lane, warp) + from_first_key - key)

    @inlined
    def seen_columns(i, thread, r, k_smem):
        """Bits of those of the lane's columns of query tile i that see its key r."""
        lane, warp = thread & int32(31), thread >> int32(5)
        first_column = int32(i * int32(tile_m) + first_query_of(lane, warp))
        key = (warp >> shift) * warp_rows + int32(first_row_of(lane)) + r * 8
        first_query, end_query = block_state.get_range(k_smem + int32(plan.seen) + 8 * key)
        return columns_within(int32(first_query - first_column), int32(end_query - first_column), 0)

    @inlined
    def find_kept(i, heads_left, kept, k_smem, thread, arrays, sizes):
        """kept <- which of the lane's weights of query tile i of a head count."""
        lane, warp = thread & int32(31), thread >> int32(5)
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        _, end_head = block_state.get(k_smem + int32(lse_delta_at))
        b, tile = block_state.get(k_smem + int32(tile_at))
        first_key = tile >> 32
        first_q_pos = int64(i) * tile_m + first_query_of(lane, warp) + from_first_key + first_key
        key = first_key + (warp >> shift) * warp_rows + int32(first_row_of(lane))
        kept_of(kept, first_q_pos, b, end_head - heads_left, key, arrays, sizes)

    @inlined
    def load_for_scores(i, heads_left, registers, k_smem, arrays, strides, sizes, masked):
        """Loads what the scores of query tile i of a head need from global memory, while they are computed."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        part_i = int32(i * groups + (warp & (groups - 1)))  # index of the warp's part of the queries
        origin, inside = origin_at(heads_left, k_smem, strides), FALSE if masked else TRUE
        loaded, shown_bits, first_row = registers.loaded, registers.shown_bits, (warp >> shift) * warp_rows
        load_reads(loaded, shown_bits, part_i, origin, first_row, lane, arrays, strides, sizes, inside)

    @inlined
    def ask_functions(i, heads_left, registers, k_smem, arrays, strides, score):
        """acc_s, acc_dp <- with score_mod and its derivative; shown_bits <- without what any option hides."""
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        asks = needs_mask(states_of(heads_left, k_smem, arrays, strides), i, arrays, strides) if has_states else TRUE
        for r in range(rows):
            seen = seen_columns(i, thread, r, k_smem)
            registers.shown_bits[r] = registers.shown_bits[r] & seen if has_mask else seen
        b, tile = block_state.get(k_smem + int32(tile_at))
        from_first_key, _ = block_state.get(k_smem + int32(offset_at))
        first_key = int32(tile >> 32)
        _, end_head = block_state.get(k_smem + int32(lse_delta_at))
        first_query = int32(i * int32(tile_m) + first_query_of(lane, warp))
        key = int32(first_key + (warp >> shift) * warp_rows + int32(first_row_of(lane)))
        if has_score_mod or asks:
            apply_functions(
                registers.acc_s, registers.acc_dp, registers.shown_bits, b, end_head - heads_left, first_query,
                from_first_key + first_key, key, asks, arrays, strides, score,
            )  # fmt: skip

    @inlined
    def term_of(heads_left, k_smem, arrays, strides):
        """The term that all scores of the head share (kernels/score/fragments.py)."""
        b, _ = block_state.get(k_smem + int32(tile_at))
        _, end_head = block_state.get(k_smem + int32(lse_delta_at))
        return row_term(b, end_head - heads_left, arrays, strides)

    @inlined
    def queries_at(i, heads_left, strides, k_smem):
        """The address of Q of query tile i of a head."""
        q_end, _ = block_state.get(k_smem + int32(bases_at))
        return q_end + 2 * (int32(i * int32(tile_m)) * strides.q[2] - heads_left * strides.q[1])

    @inlined
    def others_at(i, heads_left, strides, sizes, k_smem):
        """The addresses of dO of query tile i of a head, and of the head's lse and -delta."""
        _, do_end = block_state.get(k_smem + int32(bases_at))
        lse_delta_end, _ = block_state.get(k_smem + int32(lse_delta_at))
        do_place = do_end + 2 * (int32(i * int32(tile_m)) * strides.do[2] - heads_left * strides.do[1])
        return do_place, lse_delta_end - heads_left * (row_blocks(sizes.seqlen_q) * (4 * block_words))

    @inlined
    def states_of(heads_left, k_smem, arrays, strides):
        """Where the states of the head's tiles begin (kernels/score/tile_walk.py)."""
        b, tile = block_state.get(k_smem + int32(tile_at))
        _, end_head = block_state.get(k_smem + int32(lse_delta_at))
        return states_row(b, int32(end_head - heads_left), int32(tile >> 32), arrays, strides)

    @inlined
    def from_tile(i, heads_left, k_smem, arrays, strides):
        """-> (i, heads_left) of the first query tile from i on in which a mask_mod leaves something."""
        begin, stop = block_state.get_range(k_smem + int32(walk_at))
        found = first_tile(states_of(heads_left, k_smem, arrays, strides), i, stop, arrays, strides)
        while found >= stop and heads_left > 0:
            heads_left = int32(heads_left - 1)
            if heads_left > 0:
                found = first_tile(states_of(heads_left, k_smem, arrays, strides), begin, stop, arrays, strides)
        return found, heads_left

    @inlined
    def following(i, heads_left, k_smem, arrays, strides):
        """-> (i, heads_left) of the next query tile: after the last one, the first one of the next head."""
        if has_states:
            return from_tile(int32(i + 1), heads_left, k_smem, arrays, strides)
        begin, stop = block_state.get_range(k_smem + int32(walk_at))
        after = int32(i + 1)
        last = after == stop
        return begin if last else after, int32(heads_left - 1) if last else heads_left

    @inlined
    def is_unmasked(i, heads_left, k_smem, arrays, strides):
        """Whether every query of tile i sees every key of the block, and no function is called there."""
        if has_score_mod:
            return False
        free, cut = block_state.get_range(k_smem + int32(walk_at + 8))
        whole = i >= free and i < cut
        if has_states:
            if whole and heads_left > 0:
                whole = not needs_mask(states_of(heads_left, k_smem, arrays, strides), i, arrays, strides)
        return whole

    @inlined
    def origin_at(heads_left, k_smem, strides):
        """Where the head's bias and its mask's bits begin (kernels/score/reads.py)."""
        bias, bits = block_state.get(k_smem + int32(reads_at))
        _, tile = block_state.get(k_smem + int32(tile_at))
        bias, bits = (
            bias - heads_left * (bias_item * strides.bias[1]),
            bits - heads_left * (4 * strides.mask_bits_of_keys[1]),
        )
        return Origin(bias, bits, int32(tile >> 32))

    @inlined
    def work_again(k_smem, sizes):
        """-> KeyWork, from the state of the block."""
        b, tile = block_state.get(k_smem + int32(tile_at))
        first_key, h_kv = int32(tile >> 32), int32(tile)
        from_first_key, keys = block_state.get(k_smem + int32(offset_at))
        sequence = Sequence(int32(b), sizes.seqlen_q, keys, from_first_key + first_key)
        return KeyWork(sequence, h_kv, first_key)

    state = (set_up_state, work_again)
    of_tile = (distances, seen_columns, find_kept, load_for_scores, ask_functions, term_of)
    return Walk(*state, *of_tile, queries_at, others_at, from_tile, following, is_unmasked, origin_at)
