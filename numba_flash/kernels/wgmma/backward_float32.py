"""dK and dV, or dQ, in float32 for Hopper (sm_90a): each product is a sum of wgmma products of bfloat16 parts.

Read backward.py first, and parts.py for the products of parts. With config.of_keys a block owns 64 keys of one KV
head. It loops over the query tiles that see them, for each query head of the group (listing 7 of docs/backward.md,
lines 6 to 12):

    S^T = K Q^T    P^T = e^(S^T - lse)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK += dS^T Q

Otherwise it owns 64 queries of one head. It loops over the key tiles that they see, the last one first (listing 8,
lines 6 to 10):

    S = Q K^T    P = e^(S - lse)    dP = dO V^T    dS = P * (dP - delta)    dQ += dS K

At the end dK and dQ are multiplied by scale.

Roles. The producer warpgroup splits the tiles of the loop into parts (backward_producer_float32.py). The first of two
consumers computes S, P and dV, the second dP, dS and dK or dQ (backward_scores_float32.py). Each begins by splitting
one of the block's own tiles: K and V, or Q and dO. If only dV is asked for, there is no second consumer.

Launch: grid (batch * heads_kv * key tiles), or (batch * heads * query tiles); block (config.threads),
config.shared_bytes of dynamic shared memory. Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous
along dim; dk, dv and dq are contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from ...ptx import cluster, local, memory, special
from ..recompute import keys as recompute_keys, queries as recompute_queries
from ..steps import lse_delta, row_writers
from ..steps.basics import divide, first_column_of, first_row_of, inlined
from ..steps.sequence import QueryTile, key_row, lse_row, query_row
from . import backward_producer_float32, backward_scores_float32, backward_tiles_float32, backward_work, block
from .backward_scores_float32 import FIRST, SECOND, Held
from .block import FIRST_ROW, H_KV, H, aligned, rows_in_warpgroup, warpgroup_index


def make(config):
    of_keys, tile_rows = config.of_keys, config.other_rows
    query_count = tile_rows // 4 if of_keys else 2  # of the lane's columns or rows, whichever are queries
    give_registers, take_registers = block.register_moves(config)
    word, sequence_of = block.state_of(config).read, block.sequence_of_work(config)
    work = (backward_work.of_keys if of_keys else backward_work.of_queries)(config)
    behind = backward_work.tiles(config).behind
    packed, queries_of = config.packed, block.sequence_of_work(config, queries=True)
    tiles, walk = backward_tiles_float32.make(config), backward_work.query_walk(config, whole_warp=True)
    producer, scores = backward_producer_float32.make(config, tiles), backward_scores_float32.make(config, tiles)
    a, b, score_count, frag_count = tiles.a, tiles.b, tile_rows // 2, config.PARTS * tile_rows // 4
    of_query = lse_delta.of_query(config)

    @inlined
    def load_columns(found, values, base, step, arrays, strides, sizes):
        """found (tile_m / 8, 2) <- the values of the queries in the lane's columns; 0 past the last query."""
        _, lane = rows_in_warpgroup()
        first = int32(step.i * tile_rows + first_column_of(lane))
        head, sequence = word(base, H) + step.member, queries_of(base, arrays, strides, sizes)
        place = memory.address(values, lse_row(sequence, head, first, sizes))
        queries_left = int32(sequence.seqlen_q - first)
        for n in range(tile_rows // 8):
            for x in range(2):
                here = uint32(1) if 8 * n + x < queries_left else uint32(0)
                found[2 * n + x] = memory.load_b32_if(place + 4 * (8 * n + x), here).view(np.float32)

    @inlined
    def load_rows(lse, delta, base, arrays, strides, sizes):
        """lse, delta (2,) <- those of the lane's two queries."""
        first_row, lane = rows_in_warpgroup()
        sequence = queries_of(base, arrays, strides, sizes)
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse[r], delta[r] = of_query(sequence, word(base, H), query, arrays, sizes)

    def writer(head_dim, padded, recompute):
        """-> write, a device function for one gradient."""
        # In a pair a block has a part of the columns: the first one those up to `padded`.
        store = row_writers.of_gradient("float32", 16, padded // 8, head_dim % 2 == 0)

        @inlined
        def write(base, acc, factor, target, of_target, arrays, strides, sizes, score):
            """Writes a warp's rows of factor * acc."""
            first_row, lane = rows_in_warpgroup()
            sequence, tile_row = sequence_of(base, arrays, strides, sizes), word(base, FIRST_ROW)
            first = int32(tile_row + first_row)
            if of_keys:
                h, rows_left, valid = word(base, H_KV), int32(sizes.seqlen_k - first), int32(sequence.keys - first)
                if packed:  # outside.py writes what is behind the valid keys
                    rows_left = valid
                to = key_row(of_target, sequence, h, first)
            else:
                h, rows_left, valid = word(base, H), int32(sequence.seqlen_q - first), int32(sequence.seqlen_q - first)
                to = query_row(of_target, sequence, h, first)
            column = int32(cluster.rank() * padded) if config.paired else int32(0)
            columns_left = int32(head_dim - column)
            found = store(acc, factor, lane, target, to + column, of_target[2], rows_left, valid, columns_left)
            nonfinite = tiles.leave(base, found)
            if nonfinite != 0:
                if of_keys:
                    recompute(nonfinite, first_row, lane, sequence, h, tile_row, arrays, strides, sizes, score)
                else:
                    tile = QueryTile(sequence.b, h, tile_row, int32(0))
                    recompute(nonfinite, first_row, lane, tile, arrays, strides, sizes, score)

        return write

    if of_keys:
        write_a = writer(config.head_dim, config.head_dim_padded, recompute_keys.make(config, True, False))
        write_b = writer(config.head_dim_v, config.head_dim_v_padded, recompute_keys.make(config, False, True))
    else:
        write_a, write_b = writer(config.head_dim, config.head_dim_padded, recompute_queries.make(config)), None

    @inlined
    def consume_first(base, arrays, strides, sizes, score):
        """The first consumer computes S and P of all tiles, and dV."""
        acc_s, other = local.array(score_count, float32), local.array(score_count, float32)
        mask_bits, shown_bits = local.array(scores.mask_words, uint32), local.array(scores.bits_words, uint32)
        distance, loaded = local.array(2, float32), local.array(scores.bias_words, scores.bias_type)
        held = Held(acc_s, other, mask_bits, distance, loaded, shown_bits)
        lse, delta = local.array(query_count, float32), local.array(query_count, float32)
        acc_dv = local.array(b.sum_count, float32)  # (head_dim_v_padded / 8, 4)
        p_frag = local.array(frag_count, uint32)  # (3, tile_m / 8, 2)
        even, odd = local.array(b.even_count, float32), local.array(b.odd_count, float32)
        if config.of_p:
            block.clear(acc_dv, b.sum_count)
        scores.start(held)
        producer.load_own_a(base, FIRST, arrays, strides, sizes)
        if not of_keys:
            load_rows(lse, delta, base, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), walk.first_step(base, arrays, strides), walk.steps(base)
        while step.n < steps:
            if of_keys:
                load_columns(lse, arrays.lse, base, step, arrays, strides, sizes)
            scores.to_weights(base, step, weights, held, lse, arrays, strides, sizes, score)
            if config.of_p:
                scores.add_b(base, step, held.acc_s, acc_dv, p_frag, even, odd)
            step = walk.next_step(base, step, arrays, strides)
        if config.of_p:
            write_b(base, acc_dv, float32(1), arrays.dv, strides.dv, arrays, strides, sizes, score)
        else:
            tiles.leave(base, uint32(0))

    @inlined
    def consume_second(base, arrays, strides, sizes, score):
        """The second consumer computes dP and dS of all tiles, and dK or dQ."""
        acc_dp, other = local.array(score_count, float32), local.array(score_count, float32)
        lse, delta = local.array(query_count, float32), local.array(query_count, float32)
        acc = local.array(a.sum_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = local.array(frag_count, uint32)  # (3, rows of the tile / 8, 2)
        even, odd = local.array(a.even_count, float32), local.array(a.odd_count, float32)
        block.clear(acc, a.sum_count)
        producer.load_own_b(base, SECOND, arrays, strides, sizes)
        if not of_keys:
            load_rows(lse, delta, base, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), walk.first_step(base, arrays, strides), walk.steps(base)
        while step.n < steps:
            if of_keys:
                load_columns(delta, arrays.delta, base, step, arrays, strides, sizes)
            scores.to_score_gradients(base, step, weights, acc_dp, other, delta)
            scores.add_a(base, step, acc_dp, acc, ds_frag, even, odd)
            step = walk.next_step(base, step, arrays, strides)
        if of_keys:
            write_a(base, acc, score.scale, arrays.dk, strides.dk, arrays, strides, sizes, score)
        else:
            write_a(base, acc, score.scale, arrays.dq, strides.dq, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_backward_float32(arrays, strides, sizes, score):
        base, warpgroup = aligned(cuda.shared.array(0, uint8), config.ALIGNMENT), warpgroup_index()
        if packed:
            # The whole block leaves, and with it the other one of a pair.
            if behind(divide(special.block_index(), config.cluster), arrays, strides, sizes):
                return
        if special.thread_index() == 0:
            tiles.set_up(base)
            work.write(base, divide(special.block_index(), config.cluster), arrays, strides, sizes)
        tiles.start()
        if warpgroup == 0:
            give_registers()
            producer.produce(base, arrays, strides, sizes)
            tiles.leave(base, uint32(0))
        elif warpgroup == 1:
            take_registers()
            consume_first(base, arrays, strides, sizes, score)
        elif config.of_ds:
            take_registers()
            consume_second(base, arrays, strides, sizes, score)

    return flash_attention_wgmma_backward_float32
