"""dQ in float32 for Hopper (sm_90a): each product is a sum of wgmma products of bfloat16 parts.

Read backward_dkdv_float32.py first. A block owns 64 queries of one head. It loops over the key tiles that they see, the
last one first (listing 8 of docs/algorithm.md, lines 6 to 10):

    S = Q K^T    P = e^(S - lse)    dP = dO V^T    dS = P * (dP - delta)    dQ += dS K

At the end dQ *= scale. The producer splits tiles of K and V into parts. The first consumer owns Q and computes S and P.
The second owns dO and computes dP, dS and dQ.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory. Rows
of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dq is contiguous.
"""

from numba import cuda, float32, int32, uint8, uint32

from ...ptx import local, setmaxnreg, shared, shfl, special
from ..recompute import queries as recompute
from ..score import fragments
from ..steps import lse_delta
from ..steps.inlined import inlined
from ..steps.plain import first_row_of
from ..steps.query_tile import QueryTile
from ..steps.sequence import queries_of, query_row
from . import (
    backward_producer_float32,
    backward_query_work,
    backward_scores_float32,
    backward_state,
    backward_tiles_float32,
    gradient_rows_float32,
    paired_producer,
    paired_tiles,
)
from .backward_scores_float32 import FIRST, SECOND, Held, rows_of_lane
from .backward_state import BATCH, FIRST_ROW, HEAD, MEMBERS


def make(config):
    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    set_up_state = backward_query_work.make(config)
    put, _, word, _ = backward_state.words(config)
    producer = paired_producer if config.paired else backward_producer_float32
    of_tiles = (paired_tiles if config.paired else backward_tiles_float32).make(config)
    steps_of, first_step, step_behind, produce, load_q, load_do = producer.make(config)
    scores = backward_scores_float32.make(config)
    s_count, other_count, mask_words, distance_count, bias_words, bits_words = scores.words
    dq_count, dq_even, dq_odd = scores.counts_a
    of_query, row_term = lse_delta.of_query(config), fragments.chain(config).row_term
    store_dq = gradient_rows_float32.of_block(config, config.head_dim, config.head_dim_padded)
    recompute_dq = recompute.make(config)

    @inlined
    def load_rows(lse, delta, base, arrays, strides, sizes):
        """Loads lse and delta of the lane's two queries."""
        first_row, lane = rows_of_lane()
        sequence = queries_of(word(base, BATCH), arrays, strides, sizes)
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse[r], delta[r] = of_query(sequence, word(base, HEAD), query, arrays, sizes)

    @inlined
    def write(base, acc_dq, arrays, strides, sizes, score):
        """A warp's rows of dQ."""
        first_row, lane = rows_of_lane()
        tile = QueryTile(word(base, BATCH), word(base, HEAD), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(tile.b, arrays, strides, sizes)
        first = int32(tile.first_query + first_row)
        left = int32(sequence.seqlen_q - first)
        to, step = query_row(strides.dq, sequence, tile.h, first), strides.dq[2]
        nonfinite = of_tiles.leave(base, store_dq(acc_dq, score.scale, lane, arrays.dq, to, step, left, left))
        if nonfinite != 0:
            term = row_term(tile.b, tile.h, arrays, strides)
            recompute_dq(nonfinite, first_row, lane, tile, term, arrays, strides, sizes, score)

    @inlined
    def consume_first(base, arrays, strides, sizes, score):
        """S and P of all key tiles."""
        held = Held(
            local.array(s_count, float32),
            local.array(other_count, float32),
            local.array(mask_words, uint32),
            local.array(distance_count, float32),
            local.array(bias_words, scores.bias_type),
            local.array(bits_words, uint32),
        )
        lse, delta = local.array(2, float32), local.array(2, float32)
        scores.start(held)
        load_q(base, FIRST, arrays, strides, sizes)
        load_rows(lse, delta, base, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), first_step(base), steps_of(base)
        while step.n < steps:
            scores.to_weights(base, step, weights, held, lse, arrays, strides, sizes, score)
            step = step_behind(base, step)
        scores.my_turn(FIRST)  # takes the turn that was passed on after the last tile
        of_tiles.leave(base, uint32(0))

    @inlined
    def consume_second(base, arrays, strides, sizes, score):
        """dP and dS of all key tiles, and dQ."""
        acc_dp, other = local.array(s_count, float32), local.array(other_count, float32)  # (tile_n / 8, 4)
        lse, delta = local.array(2, float32), local.array(2, float32)
        acc_dq = local.array(dq_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = local.array(scores.frag_count, uint32)  # (3, tile_n / 8, 2)
        even, odd = local.array(dq_even, float32), local.array(dq_odd, float32)
        for x in range(dq_count):
            acc_dq[x] = float32(0)
        scores.next_turn(SECOND)  # the first consumer has the first turn
        load_do(base, SECOND, arrays, strides, sizes)
        load_rows(lse, delta, base, arrays, strides, sizes)
        weights, step, steps = scores.weights_at(base), first_step(base), steps_of(base)
        while step.n < steps:
            scores.to_score_gradients(base, step, weights, acc_dp, other, delta)
            scores.add_a(base, step, acc_dp, acc_dq, ds_frag, even, odd)
            step = step_behind(base, step)
        write(base, acc_dq, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_dq_float32(arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared.address(smem) + int32(config.ALIGNMENT - 1)) & int32(-config.ALIGNMENT))
        thread = special.thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be uniform in the warp
        if thread == 0:
            of_tiles.set_up(base)
            set_up_state(base, arrays, strides, sizes)
            put(base, MEMBERS, 1)
        of_tiles.start()
        if warpgroup == 0:
            give_registers()
            produce(base, arrays, strides, sizes)
            of_tiles.leave(base, uint32(0))
        elif warpgroup == 1:
            take_registers()
            consume_first(base, arrays, strides, sizes, score)
        else:
            take_registers()
            consume_second(base, arrays, strides, sizes, score)

    return flash_attention_wgmma_dq_float32
