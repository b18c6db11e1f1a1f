"""dQ for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them.

Read wgmma/backward_dkdv first. It is listing 8 of docs/backward.md. A block owns a query tile of one head. It loops
over the key tiles that the queries see, the last one first:

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                   line 6
    dP = dO V^T    dS = P * (dP - delta)                             lines 7 and 8
    dQ += dS K                         and at the end dQ *= scale    lines 9 and 10

Each consumer warpgroup owns 64 queries. The elements of dS that a lane holds are, rounded to 16 bits, those it needs of
the A operand of dS K. K is read from shared memory twice, once as rows and once as columns. The gradient of a number of
aux that all scores of a head share is a sum in registers, and one more for each warp at the end.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory; tensor
maps of q, k, v and do. dq is contiguous.
"""

import math

from numba import float32, int32, uint32

from ...ptx import bar, local, wgmma
from ..recompute import queries as recompute
from ..score import aux_gradient, fragments, tile_walk
from ..steps import gradient_rows, lse_delta
from ..steps.basics import FALSE, first_row_of, inlined
from ..steps.sequence import QueryTile, query_row
from . import backward_producer, backward_products, bias_boxes, block, pipeline
from .backward_scores import TileFragments
from .backward_two_kernels import Queries, TileStep, kernel, scores_of
from .block import BEGIN, CUT, FIRST_ROW, FREE, H_KV, KEYS, STATES, STOP, B, H, rows_of_lane
from .operands import describe_rows, wait_all, wait_but_one


def make(config):
    tile_m, tile_n, plan = config.tile_m, config.tile_n, config.shared_layout()
    head_dim, head_dim_padded = config.head_dim, config.head_dim_padded
    s_count, frag_count, dq_count = tile_n // 2, tile_n // 4, head_dim_padded // 2
    products, pin_s, pin_dq = backward_products.make(config), wgmma.pin(s_count), wgmma.pin(dq_count)

    aux = aux_gradient.make(config) if config.wanted_aux else None
    packed, places, queries_of = config.packed, block.places(config), block.sequence_of_work(config, queries=True)
    padded = packed or config.has("seqlens_k")  # K may hold anything after the valid keys
    word, word_alone = block.state_of(config).read, block.state_of(config).read_alone
    rings, scores = pipeline.of_backward(config), scores_of(config)
    load = backward_producer.loaders(config)
    fetch_bias = bias_boxes.make(config, tile_m).fetch
    chain, (mask_words, shown_words, kept_words, bias_words) = fragments.chain(config), scores.words
    of_thread, of_warp = tile_walk.make(config), tile_walk.make(config, whole_warp=True)
    zero_tail = block.tail_zeroer(config, head_dim_padded, 4)
    stage_dq, store_dq = gradient_rows.make(config.dtype, tile_m, 16, head_dim, head_dim % 8 == 0)
    recompute_queries = recompute.make(config)

    @inlined
    def next_tile(base, j, arrays, strides):
        """The key tile after j, for one thread."""
        if of_thread.present:
            states, begin = word_alone(base, STATES), word_alone(base, BEGIN)
            return int32(of_thread.next_tile(states, j, begin, arrays, strides))
        return int32(j - 1)

    @inlined
    def produce_a(base, arrays, strides, sizes):
        """One thread: Q and dO, then K with its bias, tile after tile."""
        load.load_own(
            base, places.query_row(base, word_alone(base, FIRST_ROW)), word_alone(base, H), places.entry(base)
        )
        n, j = int32(0), int32(word_alone(base, STOP) - 1)
        while j >= word_alone(base, BEGIN):
            first_key, b = int32(j * tile_n), word_alone(base, B)
            row, entry = places.key_row(base, first_key), int32(0) if packed else b
            stage = load.load_a(base, n, row, word_alone(base, H_KV), entry, config.bias_bytes)
            if config.bias_boxes:
                to, full = base + plan.bias + stage * config.bias_bytes, rings.a.full(base, n)
                fetch_bias(to, full, word_alone(base, FIRST_ROW), first_key, word_alone(base, H), b, strides)
            n, j = int32(n + 1), next_tile(base, j, arrays, strides)
        load.load_none(base, n, sizes)

    @inlined
    def produce_b(base, arrays, strides):
        """One thread of another warp, so that neither producer waits for the other: V."""
        n, j = int32(0), int32(word_alone(base, STOP) - 1)
        while j >= word_alone(base, BEGIN):
            load.load_b(base, n, places.key_row(base, int32(j * tile_n)), word_alone(base, H_KV), places.entry(base), 0)
            n, j = int32(n + 1), next_tile(base, j, arrays, strides)

    @inlined
    def load_lse_delta(base, arrays, strides, sizes, lse_log2, minus_delta):
        """Loads lse and -delta of the lane's two rows."""
        first_row, lane = rows_of_lane()
        sequence, h = queries_of(base, arrays, strides, sizes), word(base, H)
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse_log2[r] = float32(math.inf)
            minus_delta[r] = float32(0)
            if query < sequence.seqlen_q:
                row = lse_delta.block_row(sequence, h, query, sizes)
                lse_log2[r] = arrays.lse_delta[row]
                minus_delta[r] = arrays.lse_delta[row + lse_delta.MINUS_DELTA]

    @inlined
    def write(base, acc_dq, arrays, strides, sizes, score):
        """Stages dQ in the place of the warpgroup's own rows of Q, and writes it from there to global memory."""
        first_row, lane = rows_of_lane()
        own = QueryTile(word(base, B), word(base, H), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(base, arrays, strides, sizes)
        queries_left = int32(min(sequence.seqlen_q - own.first_query, tile_m))
        nonfinite = stage_dq(acc_dq, score.scale, base + plan.own_a, first_row, lane, queries_left)
        to, row = query_row(strides.dq, sequence, own.h, own.first_query), strides.dq[2]
        store_dq(base + plan.own_a, first_row, lane, arrays.dq, to, row, queries_left, head_dim, nonfinite)
        if nonfinite != 0:
            recompute_queries(nonfinite, first_row, lane, own, arrays, strides, sizes, score)

    @inlined
    def ahead(base, j, tile, arrays, strides, sizes):
        """-> whether mask_mod removes something of key tile j, the next one; what it leaves is being loaded."""
        if not of_warp.present:
            return of_warp.needs_mask(int32(0), j, arrays, strides)
        j = max(j, word(base, BEGIN))  # if none is left
        asks = of_warp.needs_mask(word(base, STATES), j, arrays, strides)
        scores.load_ahead(base, j, int32(0), asks, tile, arrays, strides, sizes)
        return asks

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 queries of the block's tile."""
        acc_s, acc_dp = local.array(s_count, float32), local.array(s_count, float32)
        acc_dq = local.array(dq_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = local.array(frag_count, uint32)
        mask_bits = local.array(mask_words, uint32)
        shown_bits, kept = local.array(shown_words, uint32), local.array(kept_words, uint32)
        loaded, distance = local.array(bias_words, uint32), local.array(2, float32)
        daux = local.array(s_count if config.wanted_aux else 1, float32)
        run = aux_gradient.Run(local.array(1, int32), local.array(1, float32))
        tile = TileFragments(acc_s, acc_dp, ds_frag, ds_frag, mask_bits, shown_bits, kept, loaded, distance, daux, run)
        lse_log2, minus_delta = local.array(2, float32), local.array(2, float32)
        me, elected = int32(warpgroup - 1), block.elected()  # me: which of the consumers
        q_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        do_desc = describe_rows(base + plan.own_b + me * (64 * 128))
        block.clear(acc_s, s_count)
        block.clear(acc_dp, s_count)
        block.clear(acc_dq, dq_count)
        block.clear(mask_bits, mask_words)
        block.clear(distance, 2)
        term = float32(0)
        if chain.has_row_term:
            term = chain.row_term(word(base, B), word(base, H), arrays, strides)
        if config.wanted_aux:
            aux.start(run)
        load_lse_delta(base, arrays, strides, sizes, lse_log2, minus_delta)
        queries = Queries(lse_log2, minus_delta, term)

        begin = word(base, BEGIN)
        states = word(base, STATES) if of_thread.present else int32(0)
        j = int32(word(base, STOP) - 1)
        n = int32(0)
        rings.own.consumer_wait(base, 0)
        if padded:
            rings.a.consumer_wait(base, n)
            keys_left = int32(word(base, KEYS) - j * tile_n)
            if j >= begin and keys_left < tile_n:
                zero_tail(base + plan.stream_a, keys_left)
        pin_s(acc_s)
        pin_s(acc_dp)
        pin_dq(acc_dq)
        products.issue_s(base, acc_s, q_desc, n, FALSE)
        asks = ahead(base, j, tile, arrays, strides, sizes)
        while j >= begin:
            rings.b.consumer_wait(base, n)
            masked = j >= word(base, CUT) or j < word(base, FREE)
            step = TileStep(n, j, int32(0), masked, asks)
            scores.to_ds(base, step, queries, tile, do_desc, elected, arrays, strides, sizes, score)
            products.issue_a(base, acc_dq, ds_frag, n)
            products.issue_s(base, acc_s, q_desc, int32(n + 1), FALSE)
            j = int32(of_warp.next_tile(states, j, begin, arrays, strides))
            asks = ahead(base, j, tile, arrays, strides, sizes)
            wait_but_one()
            pin_dq(acc_dq)
            products.release_a(base, n, elected)
            n = int32(n + 1)
        wait_all()
        if config.wanted_aux:
            aux.finish_warp(run, arrays, sizes)

        bar.sync(me + 1, 128)  # all four warps have read the warpgroup's own rows for the last time
        write(base, acc_dq, arrays, strides, sizes, score)

    return kernel(config, produce_a, produce_b, consume)
