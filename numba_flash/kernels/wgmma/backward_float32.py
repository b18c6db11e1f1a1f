"""Gradients in float32 for Hopper (sm_90a): wgmma with products of parts. dK and dV of a tile of keys, or dQ of a tile
of queries.

Read backward_dkdv.py first, and parts.py: what is multiplied. A block owns 64 keys of one KV head, or 64 queries of one
head, and walks over the tiles of the other side that they see. With keys, of each query head of the group in turn,

    S^T = K Q^T    P^T = e^(S^T - lse)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK += dS^T Q

and with queries S = Q K^T, P, dP = dO V^T, dS, and dQ += dS K: the same with other tiles in their places. The own tiles
and those of the walk are called a where they are of head_dim, K and Q, and b where they are of head_dim_v, V and dO.

Roles. The producer warpgroup reads the tiles of the walk from global memory, takes each number apart and writes three
parts to shared memory. Two consumers share all 64 rows, because sums of both gradients and scores in parts are more
than the registers of one. The first computes S and P, and sums up dV. It hands P, times the derivative of the score,
over to the second through shared memory: the same thread of both has the same elements. The second computes dP and dS,
and sums up dK or dQ. Each begins by taking apart its own tile.

Products of one consumer run beside what the other does between its own. They take turns with the tensor cores,

    first   S(0)       dV(0)       S(1)       dV(1) ...      and for dQ   S(0)       S(1)         S(2) ...
    second       dP(0)       dK(0)      dP(1)       ...                        dP(0)      dQ(0) dP(1) ...

so that P is worked out beside dP, and dS beside dV, or beside the next S.

Launch: grid (batch * heads_kv * key tiles), or (batch * heads * query tiles); block (config.threads),
config.shared_bytes of dynamic shared memory. Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous
along dim; dq, dk and dv are contiguous.
"""

import math

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, fence, ld_st, mbarrier, memory, setmaxnreg, shared, shfl, special
from ..score import fragments
from ..score import reads as score_reads
from ..score.stage import FragmentAt, exponent_unit
from ..steps import lse_delta
from ..steps import recompute_keys as of_own_keys
from ..steps import recompute_queries as of_own_queries
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.plain import first_column_of, first_row_of
from ..steps.query_tile import QueryTile, TileKeys
from ..steps.tiles import row_base
from . import (
    backward_key_work,
    backward_products_float32,
    backward_query_work,
    backward_state,
    gradient_rows_float32,
    parts,
)
from .backward_state import BATCH, BEGIN, CUT, FIRST_ROW, FREE, HEAD, HEAD_KV, KEYS, MEMBERS, STOP

LOADED_ROWS = 32  # of its own 64 that a consumer takes apart at a time


def make(config):
    of_keys, rows, own_rows = config.of_keys, config.stream_rows, config.own_rows
    sums_dv = of_keys and config.of_dv  # by the first consumer
    has_second = not of_keys or config.of_dk
    both_sum = sums_dv and has_second
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    plan, at, alignment = config.shared_plan(), config.barriers(), config.ALIGNMENT
    stages_a, stages_b = config.stages_a, config.stages_b
    a_part = config.parts_bytes(rows, config.head_dim_padded) // config.PARTS
    b_part = config.parts_bytes(rows, config.head_dim_v_padded) // config.PARTS
    a_bytes, b_bytes = config.PARTS * a_part, config.PARTS * b_part  # of a stage
    own_a_part = config.parts_bytes(own_rows, config.head_dim_padded) // config.PARTS
    own_b_part = config.parts_bytes(own_rows, config.head_dim_v_padded) // config.PARTS
    blocks, varies = rows // 8, config.derivative_varies
    row_numbers = 2 * blocks if of_keys else 2  # of lse, and of delta: those of a lane's queries

    a, b = (backward_products_float32.make(config, n) for n in (config.head_dim_padded, config.head_dim_v_padded))
    s_count, frag_count, dv_count = a.score_count, a.frag_count, b.sum_count if sums_dv else 1
    gradient_count = a.sum_count
    a_first, a_second = a.panel_counts
    b_first, b_second = b.panel_counts
    issue_s, finish_s, issue_ds, finish_ds = a.issue_scores, a.finish_scores, a.issue_sums, a.finish_sums
    issue_dp, finish_dp, issue_dv, finish_dv = b.issue_scores, b.finish_scores, b.issue_sums, b.finish_sums
    to_parts = parts.to_operand(rows)
    a_words, fetch_a, store_a = parts.loader(rows, head_dim, 64, rows * 128, a_part)
    b_words, fetch_b, store_b = parts.loader(rows, head_dim_v, 64, rows * 128, b_part)
    own_a_words, fetch_own_a, store_own_a = parts.loader(LOADED_ROWS, head_dim, 64, own_rows * 128, own_a_part)
    own_b_words, fetch_own_b, store_own_b = parts.loader(LOADED_ROWS, head_dim_v, 64, own_rows * 128, own_b_part)
    raw_words = max(a_words, b_words)

    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    put, _, word, position = backward_state.words(config)
    a_stage_of, a_phase_of = backward_state.ring(stages_a)
    b_stage_of, b_phase_of = backward_state.ring(stages_b)
    if of_keys:
        _, work_of, set_up_keys = backward_key_work.make(config)
    else:
        set_up_queries = backward_query_work.make(config)
    mask_words, visible, _, _ = fragments.tile(config, 1, rows)
    chain, (weight, _) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = score_reads.make(config, 1, rows, of_keys), config.has("mask")
    reads, origin_of, load_reads, added, hide = read.reads, read.origin, read.load, read.added, read.hide
    bias_words, bits_words, bias_type = read.bias_words, read.bits_words, read.bias_type
    row_term, has_row_term = chain.row_term, chain.has_row_term
    of_query, unit = lse_delta.of_query(config), float32(exponent_unit(config))
    inf, minus_inf = float32(math.inf), float32(-math.inf)
    store_gradient = gradient_rows_float32.make(head_dim, config.head_dim_padded)
    store_dv = gradient_rows_float32.make(head_dim_v, config.head_dim_v_padded)
    if of_keys:
        recompute_dk = of_own_keys.make(config, True, False)
        recompute_dv = of_own_keys.make(config, False, True)
    else:
        recompute_dq = of_own_queries.make(config)

    # What all roles do.

    @inlined
    def set_up(base, arrays, strides, sizes):
        """The mbarriers and the block's work, by one thread. A warp arrives once."""
        for stage in range(stages_a):
            mbarrier.init(base + at.a_full + 8 * stage, 4)
            mbarrier.init(base + at.a_empty + 8 * stage, 4 + 4 * has_second)
        for stage in range(stages_b):
            mbarrier.init(base + at.b_full + 8 * stage, 4)
            mbarrier.init(base + at.b_empty + 8 * stage, 4 * sums_dv + 4 * has_second)
        mbarrier.init(base + at.weights_full, 4)
        mbarrier.init(base + at.weights_empty, 4)
        fence.mbarrier_init()
        if of_keys:
            b, part, first_key = work_of(special.block_index(), arrays, strides, sizes)
            set_up_keys(base, b, part, first_key, arrays, strides, sizes)
        else:
            set_up_queries(base, arrays, strides, sizes)
            put(base, MEMBERS, 1)

    @inlined
    def elected():
        """Whether the lane is the one that acts for its warp."""
        return special.thread_index() & int32(31) == 0

    @inlined
    def own_thread():
        """Of the warpgroup."""
        return special.thread_index() & int32(127)

    @inlined
    def rows_of_lane():
        """-> (the warp's first row in the own tile, lane), worked out anew: registers are dear."""
        thread = own_thread()
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def behind(base, i, member):
        """-> (tile, member) of the walk behind these: all tiles of a member first, the last of them first."""
        i = int32(i - 1)
        if i < word(base, BEGIN):
            i, member = int32(word(base, STOP) - 1), int32(member + 1)
        return i, member

    @inlined
    def steps_of(base):
        return int32(word(base, MEMBERS) * (word(base, STOP) - word(base, BEGIN)))

    # The producer.

    @inlined
    def hand_over(full):
        """What the warp wrote is there for wgmma."""
        fence.proxy_async()
        bar.warp_sync()
        mbarrier.arrive_if(full, elected())

    @inlined
    def fetch(raw, fetch_rows, array, of_array, base, i, member, sizes):
        """raw <- the rows of tile i of the walk that exist; zeros past them."""
        first = int32(i * rows)
        if of_keys:
            head, rows_left = int32(word(base, HEAD) + member), int32(sizes.seqlen_q - first)
        else:
            head, rows_left = word(base, HEAD_KV), int32(word(base, KEYS) - first)
        source = memory.address(array, row_base(of_array, word(base, BATCH), head, int64(first)))
        fetch_rows(raw, source, 4 * of_array[2], int64(0), int32(0), rows_left, own_thread())

    @inlined
    def produce(base, arrays, strides, sizes):
        """The producer warpgroup: the parts of the tiles that the consumers will need."""
        raw = cuda.local.array(raw_words, uint32)
        two = cuda.local.array(2, uint32)
        array_a, of_a = (arrays.q, strides.q) if of_keys else (arrays.k, strides.k)
        array_b, of_b = (arrays.do, strides.do) if of_keys else (arrays.v, strides.v)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            stage = a_stage_of(n)
            fetch(raw, fetch_a, array_a, of_a, base, i, member, sizes)
            mbarrier.wait(base + at.a_empty + 8 * stage, a_phase_of(n) ^ 1)
            store_a(raw, int32(base + plan.stream_a + stage * a_bytes), two, own_thread())
            hand_over(base + at.a_full + 8 * stage)
            stage = b_stage_of(n)
            fetch(raw, fetch_b, array_b, of_b, base, i, member, sizes)
            mbarrier.wait(base + at.b_empty + 8 * stage, b_phase_of(n) ^ 1)
            store_b(raw, int32(base + plan.stream_b + stage * b_bytes), two, own_thread())
            hand_over(base + at.b_full + 8 * stage)
            n = int32(n + 1)
            i, member = behind(base, i, member)

    # The consumers; me: 0 is the first.

    @inlined
    def my_turn(me):
        if has_second:
            bar.sync(me + 1, 256)  # threads of two warpgroups

    @inlined
    def next_turn(me):
        if has_second:
            bar.arrive(int32(2 - me), 256)

    @inlined
    def load_own(base, me, raw, fetch_rows, store_rows, target, array, of_array, sizes):
        """The parts of the block's own rows of a tile."""
        two = cuda.local.array(2, uint32)
        first = word(base, FIRST_ROW)
        head = word(base, HEAD_KV) if of_keys else word(base, HEAD)
        rows_left = int32((word(base, KEYS) if of_keys else sizes.seqlen_q) - first)
        source = memory.address(array, row_base(of_array, word(base, BATCH), head, int64(first)))
        for first_row in range(0, own_rows, LOADED_ROWS):
            fetch_rows(raw, source, 4 * of_array[2], int64(0), int32(first_row), rows_left, own_thread())
            store_rows(raw, int32(target + first_row * 128), two, own_thread())
        fence.proxy_async()
        bar.sync(me + 3, 128)

    @inlined
    def of_columns(found, values, base, i, member, sizes):
        """found (blocks, 2) <- numbers of the queries of tile i, which are the lane's columns; 0 past the last."""
        _, lane = rows_of_lane()
        first = int32(i * rows + first_column_of(lane))
        head = int64(word(base, BATCH)) * sizes.heads + word(base, HEAD) + member
        place = memory.address(values, head * sizes.seqlen_q + first)
        queries_left = int32(sizes.seqlen_q - first)
        for n in range(blocks):
            for x in range(2):
                here = uint32(1) if 8 * n + x < queries_left else uint32(0)
                found[2 * n + x] = memory.load_b32_if(place + 4 * (8 * n + x), here).view(np.float32)

    @inlined
    def of_rows(lse, delta, base, arrays, sizes):
        """Of the lane's two queries, where the own rows are queries."""
        first_row, lane = rows_of_lane()
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse[r], delta[r] = of_query(word(base, BATCH), word(base, HEAD), query, arrays, sizes)

    @inlined
    def find_visible(base, i, sizes, mask_bits, distance):
        """mask_bits <- which of the lane's scores of tile i count; distance: q_pos - k_pos."""
        first_row, lane = rows_of_lane()
        if of_keys:  # seen from the keys, left and right change places
            left, right, end = sizes.right, sizes.left, sizes.seqlen_q
        else:
            left, right, end = sizes.left, sizes.right, int64(word(base, KEYS))
        visible(i, first_row, lane, position(base), left, right, end, mask_bits, distance)

    @inlined
    def load_for_scores(base, i, member, loaded, shown_bits, arrays, strides, sizes):
        """What is read for each of the lane's scores of tile i."""
        first_row, lane = rows_of_lane()
        head = int32(word(base, HEAD) + member)
        origin = origin_of(word(base, BATCH), head, word(base, FIRST_ROW), arrays, strides)
        load_reads(loaded, shown_bits, i, origin, first_row, lane, arrays, strides, sizes, FALSE)

    @inlined
    def lse_of(lse, n, r, x):
        """Of a column as the forward left it, where a query without keys has -inf; of a row as of_query gives it."""
        if of_keys:
            found = lse[2 * n + x] * unit
            return inf if found == minus_inf else found
        return lse[r]

    @inlined
    def weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, masked):
        """acc_s <- P, and to the second consumer goes P times the derivative of the score. masked, a constant: some
        row does not see some column."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks):
            for r in range(2):
                for x in range(2):
                    at_x = 4 * n + 2 * r + x
                    away = distance[0] - float32((n - r) * 8 + x)
                    here = FragmentAt(term, away, added(loaded, r, n, x))
                    p, derivative = weight(acc_s[at_x], here, score, lse_of(lse, n, r, x))
                    given = p * derivative if varies else p
                    if masked:
                        seen = (mask_bits[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        p, given = p if seen else float32(0), given if seen else float32(0)
                    acc_s[at_x] = p
                    four[2 * r + x] = given.view(np.uint32)
            if has_second:
                ld_st.store_v4(weights + n * 2048, four, 0)

    @inlined
    def consume_first(base, me, arrays, strides, sizes, score):
        """S and P of all tiles of the walk; with keys dV."""
        raw = cuda.local.array(own_a_words, uint32)
        acc_s = cuda.local.array(s_count, float32)  # (rows / 8, 4)
        other = cuda.local.array(s_count, float32)
        acc_dv = cuda.local.array(dv_count, float32)  # (head_dim_v_padded / 8, 4)
        p_frag = cuda.local.array(frag_count, uint32)  # (3, rows / 8, 2)
        even, odd = cuda.local.array(b_first, float32), cuda.local.array(b_second, float32)
        lse, delta = cuda.local.array(row_numbers, float32), cuda.local.array(2, float32)
        mask_bits = cuda.local.array(mask_words, uint32)
        distance = cuda.local.array(2, float32)
        loaded = cuda.local.array(bias_words, bias_type)  # (2, rows / 8, 2)
        shown_bits = cuda.local.array(bits_words, uint32)  # by the mask that was given
        for x in range(dv_count):
            acc_dv[x] = float32(0)
        for x in range(mask_words):
            mask_bits[x] = uint32(0)
        for r in range(2):
            distance[r] = float32(0)
        array, of_array = (arrays.k, strides.k) if of_keys else (arrays.q, strides.q)
        own = int32(base + plan.own_a)
        load_own(base, me, raw, fetch_own_a, store_own_a, own, array, of_array, sizes)
        if not of_keys:
            of_rows(lse, delta, base, arrays, sizes)
        weights = int32(base + plan.weights + own_thread() * 16)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            stage_a, stage_b = a_stage_of(n), b_stage_of(n)
            masked = i >= word(base, CUT) or i < word(base, FREE)
            term = float32(0)
            if has_row_term:
                term = row_term(word(base, BATCH), word(base, HEAD) + member, arrays, strides)
            if of_keys:
                of_columns(lse, arrays.lse, base, i, member, sizes)
            if reads:
                load_for_scores(base, i, member, loaded, shown_bits, arrays, strides, sizes)
            mbarrier.wait(base + at.a_full + 8 * stage_a, a_phase_of(n))
            my_turn(me)
            issue_s(acc_s, other, own, int32(base + plan.stream_a + stage_a * a_bytes))
            next_turn(me)
            if has_row_term or has_mask or masked:
                find_visible(base, i, sizes, mask_bits, distance)
            hide(mask_bits, shown_bits, TRUE)
            finish_s(acc_s, other)
            mbarrier.arrive_if(base + at.a_empty + 8 * stage_a, elected())
            if has_second:
                mbarrier.wait(base + at.weights_empty, (n & 1) ^ 1)
            if has_mask or masked:
                weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, TRUE)
            else:
                weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, FALSE)
            if has_second:
                bar.warp_sync()
                mbarrier.arrive_if(base + at.weights_full, elected())
            if sums_dv:
                to_parts(acc_s, p_frag)
                mbarrier.wait(base + at.b_full + 8 * stage_b, b_phase_of(n))
                if both_sum:
                    my_turn(me)
                issue_dv(even, odd, p_frag, int32(base + plan.stream_b + stage_b * b_bytes))
                if both_sum:
                    next_turn(me)
                finish_dv(acc_dv, even, odd, p_frag)
                mbarrier.arrive_if(base + at.b_empty + 8 * stage_b, elected())
            n = int32(n + 1)
            i, member = behind(base, i, member)
        my_turn(me)  # takes the turn that was given on when there was nothing left to do
        if sums_dv:
            write_dv(base, acc_dv, arrays, strides, sizes, score)

    @inlined
    def to_score_gradients(acc_dp, delta, weights):
        """acc_dp <- dS. Where P is 0 dP may be NaN."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks):
            ld_st.load_v4(four, 0, weights + n * 2048)
            for r in range(2):
                for x in range(2):
                    at_x = 4 * n + 2 * r + x
                    p = four[2 * r + x].view(np.float32)
                    ds = p * (acc_dp[at_x] - delta[2 * n + x if of_keys else r])
                    acc_dp[at_x] = ds if p != float32(0) else float32(0)

    @inlined
    def consume_second(base, me, arrays, strides, sizes, score):
        """dP and dS of all tiles of the walk, and dK or dQ."""
        raw = cuda.local.array(own_b_words, uint32)
        acc_dp = cuda.local.array(s_count, float32)  # (rows / 8, 4)
        other = cuda.local.array(s_count, float32)
        acc = cuda.local.array(gradient_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = cuda.local.array(frag_count, uint32)  # (3, rows / 8, 2)
        even, odd = cuda.local.array(a_first, float32), cuda.local.array(a_second, float32)
        delta, lse = cuda.local.array(row_numbers, float32), cuda.local.array(2, float32)
        for x in range(gradient_count):
            acc[x] = float32(0)
        next_turn(me)  # the first turn is the first consumer's
        array, of_array = (arrays.v, strides.v) if of_keys else (arrays.do, strides.do)
        own = int32(base + plan.own_b)
        load_own(base, me, raw, fetch_own_b, store_own_b, own, array, of_array, sizes)
        if not of_keys:
            of_rows(lse, delta, base, arrays, sizes)
        weights = int32(base + plan.weights + own_thread() * 16)
        n, member, i, steps = int32(0), int32(0), int32(word(base, STOP) - 1), steps_of(base)
        while n < steps:
            stage_a, stage_b = a_stage_of(n), b_stage_of(n)
            if of_keys:
                of_columns(delta, arrays.delta, base, i, member, sizes)
            mbarrier.wait(base + at.b_full + 8 * stage_b, b_phase_of(n))
            my_turn(me)
            issue_dp(acc_dp, other, own, int32(base + plan.stream_b + stage_b * b_bytes))
            next_turn(me)
            finish_dp(acc_dp, other)
            mbarrier.arrive_if(base + at.b_empty + 8 * stage_b, elected())
            mbarrier.wait(base + at.weights_full, n & 1)
            to_score_gradients(acc_dp, delta, weights)
            bar.warp_sync()
            mbarrier.arrive_if(base + at.weights_empty, elected())
            to_parts(acc_dp, ds_frag)
            if both_sum:
                my_turn(me)
            issue_ds(even, odd, ds_frag, int32(base + plan.stream_a + stage_a * a_bytes))
            if both_sum:
                next_turn(me)
            finish_ds(acc, even, odd, ds_frag)
            mbarrier.arrive_if(base + at.a_empty + 8 * stage_a, elected())
            n = int32(n + 1)
            i, member = behind(base, i, member)
        if of_keys:
            write_dk(base, acc, arrays, strides, sizes, score)
        else:
            write_dq(base, acc, arrays, strides, sizes, score)

    # Their results.

    @inlined
    def key_rows(base, sizes):
        """-> (first row of the warp, lane, first key, how many rows there are, how many of valid keys)."""
        first_row, lane = rows_of_lane()
        first = int32(word(base, FIRST_ROW) + first_row)
        return first_row, lane, first, int32(sizes.seqlen_k - first), int32(word(base, KEYS) - first)

    @inlined
    def write_dk(base, acc, arrays, strides, sizes, score):
        first_row, lane, first, rows_left, valid = key_rows(base, sizes)
        b, h_kv, first_key = word(base, BATCH), word(base, HEAD_KV), word(base, FIRST_ROW)
        to, step = row_base(strides.dk, b, h_kv, first), strides.dk[2]
        nonfinite = store_gradient(acc, score.scale, lane, arrays.dk, to, step, rows_left, valid)
        if nonfinite != 0:
            q_start = first_key - position(base)
            recompute_dk(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    @inlined
    def write_dv(base, acc, arrays, strides, sizes, score):
        first_row, lane, first, rows_left, valid = key_rows(base, sizes)
        b, h_kv, first_key = word(base, BATCH), word(base, HEAD_KV), word(base, FIRST_ROW)
        to, step = row_base(strides.dv, b, h_kv, first), strides.dv[2]
        nonfinite = store_dv(acc, float32(1), lane, arrays.dv, to, step, rows_left, valid)
        if nonfinite != 0:
            q_start = first_key - position(base)
            recompute_dv(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    @inlined
    def write_dq(base, acc, arrays, strides, sizes, score):
        first_row, lane = rows_of_lane()
        tile = QueryTile(word(base, BATCH), word(base, HEAD), word(base, FIRST_ROW), int32(0))
        first = int32(tile.first_query + first_row)
        left = int32(sizes.seqlen_q - first)
        to, step = row_base(strides.dq, tile.b, tile.h, first), strides.dq[2]
        nonfinite = store_gradient(acc, score.scale, lane, arrays.dq, to, step, left, left)
        if nonfinite != 0:
            term = row_term(tile.b, tile.h, arrays, strides)
            tile_keys = TileKeys(word(base, HEAD_KV), word(base, KEYS), position(base))
            recompute_dq(nonfinite, first_row, lane, tile, tile_keys, term, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_gradients_float32(arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared.address(smem) + int32(alignment - 1)) & int32(-alignment))
        thread = special.thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be the same in a whole warp
        if thread == 0:
            set_up(base, arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            produce(base, arrays, strides, sizes)
        elif warpgroup == 1:
            take_registers()
            consume_first(base, int32(0), arrays, strides, sizes, score)
        elif has_second:
            take_registers()
            consume_second(base, int32(1), arrays, strides, sizes, score)

    return flash_attention_wgmma_gradients_float32
