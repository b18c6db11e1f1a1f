"""dK and dV for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them, and both run asynchronously.

Read wgmma/forward and mma/backward_dkdv first, with backward_products beside this. It is listing 7 of docs/backward.md.
A block owns a key tile of one KV head. It loops over the query tiles that see it, for each query head of the group, and
holds the sums dK and dV in registers: no atomics, the same bits in every run. With config.members a block processes
only so many heads of the group, and leaves its sums for wgmma_add_parts. Scores are computed transposed:

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)                line 6
    dP^T = V dO^T   dS^T = P^T * (dP^T - delta)                        lines 7 and 9
    dV += P^T dO    dK += dS^T Q        and at the end dK *= scale     lines 10 to 12

The elements of P^T and dS^T that a lane holds are, rounded to 16 bits, those it needs of the A operand of dV and dK. So
neither leaves the registers. Q and dO are read from shared memory twice, once as rows and once as columns.

Roles. The producer, one thread, loads K and V once and then Q, dO, lse and delta, tile after tile. Each consumer
warpgroup owns 64 keys. Consumers synchronise only at the producer's mbarriers, so one computes exponentials while the
others multiply. S of the next tile is issued after dV and dK of this one, so the tensor cores have no gap.

P is recomputed from lse, and delta = rowsum(dO * O) replaces the softmax's derivative (Dao et al., 2022, section 3 and
appendix B). The roles are FlashAttention-3's (Shah et al., 2024).

Launch: grid (batch * heads_kv * parts of a group * key tiles), block (config.threads), config.shared_bytes of dynamic
shared memory; tensor maps of q, k, v and do. dk and dv are contiguous; with config.members, dk_sums and dv_sums are
what wgmma/backward_add_parts reads.

The rest is in backward_two_kernels.py (the roles of a block), backward_work.py (its tiles), backward_producer.py,
backward_products.py and backward_scores.py (P and dS of a tile).
"""

from numba import float32, int32, uint32

from ...ptx import bar, local, wgmma
from ..score import fragments
from ..steps.basics import FALSE, inlined
from . import backward_key_outputs, backward_producer, backward_products, backward_work, block, pipeline
from .backward_scores import TileFragments
from .backward_two_kernels import Queries, TileStep, kernel, scores_of
from .block import CUT, FREE, MEMBERS, B, H
from .operands import describe_rows, wait_all, wait_but_one, wait_but_two


def make(config):
    of_dk, of_dv, plan = config.of_dk, config.of_dv, config.shared_layout()
    s_count, frag_count = config.tile_m // 2, config.tile_m // 4
    dk_count, dv_count = config.head_dim_padded // 2 if of_dk else 1, config.head_dim_v_padded // 2 if of_dv else 1

    pin_s, pin_dk, pin_dv = wgmma.pin(s_count), wgmma.pin(dk_count), wgmma.pin(dv_count)
    products, write_gradients = backward_products.make(config), backward_key_outputs.of_block(config)
    producer, chain = backward_producer.of_keys(config), fragments.chain(config)
    scores = scores_of(config)
    mask_words, shown_words, kept_words, bias_words = scores.words
    walk, word = backward_work.query_walk(config, whole_warp=True), block.state_of(config).read
    rings = pipeline.of_backward(config)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 keys of the block's tile."""
        acc_s, acc_dp = local.array(s_count, float32), local.array(s_count, float32)
        acc_dk = local.array(dk_count, float32)  # (head_dim_padded / 8, 4)
        acc_dv = local.array(dv_count, float32)  # (head_dim_v_padded / 8, 4)
        p_frag, ds_frag = local.array(frag_count, uint32), local.array(frag_count, uint32)
        mask_bits = local.array(mask_words, uint32)
        shown_bits, kept = local.array(shown_words, uint32), local.array(kept_words, uint32)
        loaded, distance = local.array(bias_words, uint32), local.array(2, float32)
        tile = TileFragments(acc_s, acc_dp, p_frag, ds_frag, mask_bits, shown_bits, kept, loaded, distance)
        me, elected = int32(warpgroup - 1), block.elected()  # me: which of the consumers
        k_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        v_desc = describe_rows(base + plan.own_b + me * (64 * 128))
        block.clear(acc_s, s_count)
        block.clear(acc_dp, s_count)
        block.clear(acc_dk, dk_count)
        block.clear(acc_dv, dv_count)
        block.clear(mask_bits, mask_words)
        block.clear(distance, 2)

        steps = walk.steps(base)
        i, member = walk.first(base, arrays, strides)
        n = int32(0)
        rings.own.consumer_wait(base, n)
        # Otherwise ptxas copies these zeros from the accumulators of S, which are zero as well, while S is being
        # computed.
        pin_s(acc_s)
        pin_s(acc_dp)
        pin_dk(acc_dk)
        pin_dv(acc_dv)
        products.issue_s(base, acc_s, k_desc, n, FALSE)
        asks = walk.needs_mask(base, i, member, arrays, strides)
        scores.load_ahead(base, i, member, asks, tile, arrays, strides, sizes)
        while member < word(base, MEMBERS) if walk.present else n < steps:
            rings.b.consumer_wait(base, n)
            masked = i >= word(base, CUT) or i < word(base, FREE)
            lse_and_delta, term = products.lse_and_delta_at(base, n), float32(0)
            if chain.has_row_term:
                term = chain.row_term(word(base, B), word(base, H) + member, arrays, strides)
            step = TileStep(n, i, member, masked, asks)
            queries = Queries(lse_and_delta, lse_and_delta, term)
            scores.to_ds(base, step, queries, tile, v_desc, elected, arrays, strides, sizes, score)
            if of_dv:
                products.issue_b(base, acc_dv, p_frag, n)
            if of_dk:
                products.issue_a(base, acc_dk, ds_frag, n)
            products.issue_s(base, acc_s, k_desc, int32(n + 1), FALSE)
            if walk.present:
                i, member = walk.next(base, i, member, arrays, strides)
                asks = walk.needs_mask(base, i, member, arrays, strides)
                scores.load_ahead(base, i, member, asks, tile, arrays, strides, sizes)
            if of_dv and of_dk:
                wait_but_two()
                rings.b.consumer_release(base, n, elected)
            wait_but_one()
            if of_dv:
                pin_dv(acc_dv)
            if of_dk:
                pin_dk(acc_dk)
                products.release_a(base, n, elected)
            else:
                rings.b.consumer_release(base, n, elected)
            n = int32(n + 1)
            if not walk.present:
                i, member = walk.next(base, i, member, arrays, strides)
        wait_all()

        bar.sync(me + 1, 128)  # all four warps have read the warpgroup's own rows for the last time
        write_gradients(base, base, acc_dk, acc_dv, arrays, strides, sizes, score)

    @inlined
    def produce_a(base, arrays, strides, sizes):
        n = producer.load_q(base, base, int32(0), int32(0), arrays, strides, sizes)
        producer.load_none(base, n, sizes)

    @inlined
    def produce_b(base, arrays, strides):
        producer.load_do(base, base, int32(0), arrays, strides)

    return kernel(config, produce_a, produce_b, consume)
