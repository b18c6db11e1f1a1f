"""dK and dV in float32 for Hopper (sm_90a): each product is a sum of wgmma products of bfloat16 parts.

Read backward_dkdv.py first, and parts.py for the products of parts. A block owns 64 keys of one KV head. It loops over
the query tiles that see them, for each query head of the group (listing 7 of docs/algorithm.md, lines 6 to 12):

    S^T = K Q^T    P^T = e^(S^T - lse)    dV += P^T dO    dP^T = V dO^T    dS^T = P^T * (dP^T - delta)    dK += dS^T Q

At the end dK *= scale.

Roles. The producer warpgroup splits tiles of Q and dO into parts (backward_producer_float32.py). The first of two
consumers computes S, P and dV, the second dP, dS and dK (backward_scores_float32.py). Each begins by splitting one of
the block's own tiles, K or V. If dK is not asked for, there is no second consumer.

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dk and dv are contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, uint8, uint32

from ...ptx import local, memory, setmaxnreg, shared, shfl, special
from ..recompute import keys as recompute
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of
from ..steps.sequence import key_row, lse_row, queries_of
from ..steps.sequence import make as make_sequence
from . import (
    backward_key_work,
    backward_producer_float32,
    backward_scores_float32,
    backward_state,
    backward_tiles_float32,
    gradient_rows_float32,
    paired_producer,
    paired_tiles,
)
from .backward_scores_float32 import FIRST, SECOND, Held, rows_of_lane
from .backward_state import BATCH, FIRST_ROW, HEAD, HEAD_KV


def make(config):
    blocks, query_count = config.tile_m // 8, config.tile_m // 4
    pair = config.cluster  # how many blocks own the same keys
    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    _, work_of, set_up_state = backward_key_work.make(config)
    _, _, word, _ = backward_state.words(config)
    sequence_of = make_sequence(config)
    producer = paired_producer if config.paired else backward_producer_float32
    of_tiles = (paired_tiles if config.paired else backward_tiles_float32).make(config)
    steps_of, first_step, step_behind, produce, load_k, load_v = producer.make(config)
    scores = backward_scores_float32.make(config)
    s_count, other_count, mask_words, distance_count, bias_words, bits_words = scores.words
    dk_count, dk_even, dk_odd = scores.counts_a
    dv_count, dv_even, dv_odd = scores.counts_b if config.of_dv else (1, 1, 1)
    store_dk = gradient_rows_float32.of_block(config, config.head_dim, config.head_dim_padded)
    store_dv = gradient_rows_float32.of_block(config, config.head_dim_v, config.head_dim_v_padded)
    recompute_dk, recompute_dv = recompute.make(config, True, False), recompute.make(config, False, True)

    @inlined
    def load_columns(found, values, base, step, arrays, strides, sizes):
        """found (tile_m / 8, 2) <- the values of the queries in the lane's columns; 0 past the last query."""
        _, lane = rows_of_lane()
        first = int32(step.i * config.tile_m + first_column_of(lane))
        head, sequence = word(base, HEAD) + step.member, queries_of(word(base, BATCH), arrays, strides, sizes)
        place = memory.address(values, lse_row(sequence, head, first, sizes))
        queries_left = int32(sequence.seqlen_q - first)
        for n in range(blocks):
            for x in range(2):
                here = uint32(1) if 8 * n + x < queries_left else uint32(0)
                found[2 * n + x] = memory.load_b32_if(place + 4 * (8 * n + x), here).view(np.float32)

    @inlined
    def write(base, acc, factor, target, of_target, store, recompute_rows, arrays, strides, sizes, score):
        """A warp's rows of dK or dV: factor * acc."""
        first_row, lane = rows_of_lane()
        sequence = sequence_of(word(base, BATCH), arrays, strides, sizes)
        h_kv, first_key = word(base, HEAD_KV), word(base, FIRST_ROW)
        first = int32(first_key + first_row)
        rows_left, valid = int32(sizes.seqlen_k - first), int32(sequence.keys - first)
        to, step = key_row(of_target, sequence, h_kv, first), of_target[2]
        nonfinite = of_tiles.leave(base, store(acc, factor, lane, target, to, step, rows_left, valid))
        if nonfinite != 0:
            recompute_rows(nonfinite, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score)

    @inlined
    def consume_first(base, arrays, strides, sizes, score):
        """S and P of all query tiles, and dV."""
        held = Held(
            local.array(s_count, float32),
            local.array(other_count, float32),
            local.array(mask_words, uint32),
            local.array(distance_count, float32),
            local.array(bias_words, scores.bias_type),
            local.array(bits_words, uint32),
        )
        lse = local.array(query_count, float32)  # (tile_m / 8, 2)
        acc_dv = local.array(dv_count, float32)  # (head_dim_v_padded / 8, 4)
        p_frag = local.array(scores.frag_count, uint32)  # (3, tile_m / 8, 2)
        even, odd = local.array(dv_even, float32), local.array(dv_odd, float32)
        for x in range(dv_count):
            acc_dv[x] = float32(0)
        scores.start(held)
        load_k(base, FIRST, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), first_step(base), steps_of(base)
        while step.n < steps:
            load_columns(lse, arrays.lse, base, step, arrays, strides, sizes)
            scores.to_weights(base, step, weights, held, lse, arrays, strides, sizes, score)
            if config.of_dv:
                scores.add_b(base, step, held.acc_s, acc_dv, p_frag, even, odd)
            step = step_behind(base, step)
        scores.my_turn(FIRST)  # takes the turn that was passed on after the last tile
        if config.of_dv:
            write(
                base, acc_dv, float32(1), arrays.dv, strides.dv, store_dv, recompute_dv, arrays, strides, sizes, score
            )
        else:
            of_tiles.leave(base, uint32(0))

    @inlined
    def consume_second(base, arrays, strides, sizes, score):
        """dP and dS of all query tiles, and dK."""
        acc_dp, other = local.array(s_count, float32), local.array(other_count, float32)  # (tile_m / 8, 4)
        delta = local.array(query_count, float32)  # (tile_m / 8, 2)
        acc_dk = local.array(dk_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = local.array(scores.frag_count, uint32)  # (3, tile_m / 8, 2)
        even, odd = local.array(dk_even, float32), local.array(dk_odd, float32)
        for x in range(dk_count):
            acc_dk[x] = float32(0)
        scores.next_turn(SECOND)  # the first consumer has the first turn
        load_v(base, SECOND, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), first_step(base), steps_of(base)
        while step.n < steps:
            load_columns(delta, arrays.delta, base, step, arrays, strides, sizes)
            scores.to_score_gradients(base, step, weights, acc_dp, other, delta)
            scores.add_a(base, step, acc_dp, acc_dk, ds_frag, even, odd)
            step = step_behind(base, step)
        write(base, acc_dk, score.scale, arrays.dk, strides.dk, store_dk, recompute_dk, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_dkdv_float32(arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared.address(smem) + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))
        thread = special.thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be uniform in the warp
        if thread == 0:
            of_tiles.set_up(base)
            b, part, first_key = work_of(divide(special.block_index(), pair), arrays, strides, sizes)
            set_up_state(base, b, part, first_key, arrays, strides, sizes)
        of_tiles.start()
        if warpgroup == 0:
            give_registers()
            produce(base, arrays, strides, sizes)
            of_tiles.leave(base, uint32(0))
        elif warpgroup == 1:
            take_registers()
            consume_first(base, arrays, strides, sizes, score)
        elif config.of_dk:
            take_registers()
            consume_second(base, arrays, strides, sizes, score)

    return flash_attention_wgmma_dkdv_float32
