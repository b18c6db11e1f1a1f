"""dK and dV, or dQ, for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them, and both run asynchronously.

Read wgmma/forward and mma/backward first, with backward_products beside this. With config.of_keys a block owns keys of
one KV head, as in listing 7 of docs/backward.md, and loops over the query tiles that see them, for each query head of
the group. With config.members it takes only so many heads, and leaves its sums for wgmma/backward_add_parts. Scores are
computed transposed:

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)                line 6
    dP^T = V dO^T   dS^T = P^T * (dP^T - delta)                        lines 7 and 9
    dV += P^T dO    dK += dS^T Q        and at the end dK *= scale     lines 10 to 12

Otherwise it owns queries of one head, as in listing 8, and loops over the key tiles that they see, the last one first:

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                   line 6
    dP = dO V^T    dS = P * (dP - delta)                             lines 7 and 8
    dQ += dS K                         and at the end dQ *= scale    lines 9 and 10

Sums are held in registers: no atomics, the same bits in every run. The elements of P and dS that a lane holds are,
rounded to 16 bits, those it needs of the A operand of the next product. So neither leaves the registers. The tiles that
are loaded, Q and dO or K and V, are called a and b. They are read from shared memory as rows, and once more as columns.
The gradient of a number of aux that all scores of a head share is a sum beside dQ, and one more for each warp.

Roles. Two producer threads load the block's own tiles and then a, with what P and dS need of its queries, and b, tile
after tile. Each consumer warpgroup owns 64 rows. Consumers synchronise only at the producer's mbarriers, so one
computes exponentials while the others multiply. S of the next tile is issued after the sums of this one, so the tensor
cores have no gap.

P is recomputed from lse, and delta = rowsum(dO * O) replaces the softmax's derivative (Dao et al., 2022, section 3 and
appendix B). The roles are FlashAttention-3's (Shah et al., 2024).

The previous kernel may still run when a block starts (ptx/griddepcontrol.py). It and those before it write lse, delta,
the bits of a mask and the states of tiles. The bits and the states determine the block's work, so with either of them
all threads wait for it at the start. Consumers always do, so every block has waited. Producers load Q, K, V and dO,
which no backward kernel writes, and wait before they load lse and delta.

Launch: grid (batch * heads_kv * parts of a group * key tiles), or (batch * heads * query tiles); block
(config.threads), config.shared_bytes of dynamic shared memory; tensor maps of q, k, v and do. dk, dv and dq are
contiguous; with config.members, dk_sums and dv_sums are what wgmma/backward_add_parts reads.

Six files have the rest, in this order: backward_work.py (the tiles of a block, and block.py's words for them),
backward_producer.py (the two threads that load), backward_loops.py (the tiles that a consumer visits),
backward_products.py (its products), backward_scores.py (P and dS of a tile), backward_outputs.py (the gradients to
global memory).
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32

from ...ptx import griddepcontrol, local, special, wgmma
from ..score import aux_gradient, fragments
from ..steps.basics import FALSE, inlined, nothing
from . import (
    backward_loops,
    backward_outputs,
    backward_producer,
    backward_products,
    backward_scores,
    backward_work,
    block,
    pipeline,
)
from .backward_scores import TileFragments
from .block import CUT, FREE, KEYS, MEMBERS, B, H, aligned, warpgroup_index
from .operands import describe_rows, wait_all, wait_but_one, wait_but_two


class TileStep(NamedTuple):
    """A tile of the other side, in the loop of a consumer."""

    n: Any  # number of tiles before it, of all heads
    i: Any  # its number in its head: its first query or key is i * config.other_rows
    member: Any  # index of the query head in its group; 0 if the block owns queries
    masked: Any  # whether some row may not see some column, or a mask may hide something
    asks: Any  # whether mask_mod removes something
    lse_log2: Any  # with of_keys the shared address of the tile's lse and -delta; otherwise (2,), of the lane's rows
    minus_delta: Any  # likewise
    term: Any  # the number that all scores of the head share: ALiBi's slope


def make(config):
    # of_ds: the block sums up dS times a, which is dK or dQ; of_p: P times b, which is dV.
    of_keys, of_ds, of_p, plan = config.of_keys, config.of_ds, config.of_p, config.shared_layout()
    s_count, frag_count = config.other_rows // 2, config.other_rows // 4  # a lane's registers
    a_count, b_count = config.head_dim_padded // 2 if of_ds else 1, config.head_dim_v_padded // 2 if of_p else 1
    pin_s, pin_a = wgmma.pin(s_count), wgmma.pin(a_count)
    pin_b = wgmma.pin(b_count) if of_keys else nothing
    give_registers, take_registers = block.register_moves(config)
    products, scores = backward_products.make(config), backward_scores.make(config)
    mask_words, shown_words, kept_words, bias_words = scores.words
    to_weights = scores.weights_of(0, config.other_rows // 16)
    rings, word, chain = pipeline.of_backward(config), block.state_of(config).read, fragments.chain(config)
    finds_by_kernels = config.has("mask") or bool(config.tile_states)  # previous kernels write what determines the work
    tiles, set_up = backward_work.tiles(config), pipeline.starter_of_backward(config)
    # Rows of packed sequences are followed by others, and valid keys by anything.
    cuts_queries, cuts_keys = config.packed and of_keys, not of_keys and (config.packed or config.has("seqlens_k"))
    zero_queries = backward_products.zero_behind(config) if cuts_queries else nothing
    zero_keys = block.tail_zeroer(config, config.head_dim_padded, 4) if cuts_keys else nothing
    aux = aux_gradient.make(config) if config.wanted_aux else None
    if of_keys:
        work, producer = backward_work.of_keys(config), backward_producer.of_keys(config)
        loop, write = backward_loops.over_queries(config), backward_outputs.of_keys(config)
    else:
        work, producer = backward_work.of_queries(config), backward_producer.of_queries(config)
        loop, write = backward_loops.over_keys(config), backward_outputs.of_queries(config)

    @inlined
    def ahead(base, i, member, tile, arrays, strides, sizes):
        """-> whether mask_mod removes something of tile i, the next one. Issues loads of what it leaves there."""
        asks, i = loop.needs_mask(base, i, member, arrays, strides)
        scores.load_ahead(base, i, member, asks, tile, arrays, strides, sizes)
        return asks

    @inlined
    def to_ds(base, step, tile, own_desc, elected, arrays, strides, sizes, score):
        """tile.p_frag, tile.ds_frag <- P and dS of a TileStep, whose S has been issued. tile: the TileFragments;
        own_desc: wgmma's descriptor of the warpgroup's rows of V or dO."""
        every = scores.prepare(base, step, tile, arrays, strides, sizes)
        wait_all()
        pin_s(tile.acc_s)
        if cuts_queries and step.masked:  # so is a tile with rows behind the last query
            zero_queries(base, base, step)
        if of_ds:
            products.issue_dp(base, tile.acc_dp, own_desc, step.n)
        bias = base + plan.bias + rings.a.stage(step.n) * config.bias_bytes
        to_weights(base, step, tile, step.lse_log2, bias, step.term, every, arrays, strides, sizes, score)
        if of_ds:
            wait_all()
            pin_s(tile.acc_dp)
            if not of_p:
                rings.b.consumer_release(base, step.n, elected)  # only dP reads it
            scores.to_gradients(tile, step.minus_delta, score, every)
        else:
            products.release_a(base, step.n, elected)  # only S reads Q, and P has its lse

    @inlined
    def finish_sums(base, n, acc_a, acc_b, elected):
        """Waits until the n-th tile is in acc_a and acc_b, but not for S of the next one, and releases it."""
        if of_p and of_ds:
            wait_but_two()
            rings.b.consumer_release(base, n, elected)
        wait_but_one()
        if of_p:
            pin_b(acc_b)
        if of_ds:
            pin_a(acc_a)
            products.release_a(base, n, elected)
        else:
            rings.b.consumer_release(base, n, elected)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 rows of the block's tile."""
        # Registers: TileFragments has the shapes of those that are not named here.
        acc_s, acc_dp = local.array(s_count, float32), local.array(s_count, float32)
        acc_a = local.array(a_count, float32)  # dK or dQ: (head_dim_padded / 8, 4)
        acc_b = local.array(b_count, float32)  # dV: (head_dim_v_padded / 8, 4)
        p_frag, ds_frag = local.array(frag_count, uint32), local.array(frag_count, uint32)
        mask_bits = local.array(mask_words, uint32)
        shown_bits, kept = local.array(shown_words, uint32), local.array(kept_words, uint32)
        loaded, distance = local.array(bias_words, uint32), local.array(2, float32)
        daux = local.array(s_count if config.wanted_aux else 1, float32)
        run = aux_gradient.Run(local.array(1, int32), local.array(1, float32))
        tile = TileFragments(acc_s, acc_dp, p_frag, ds_frag, mask_bits, shown_bits, kept, loaded, distance, daux, run)
        me, elected = int32(warpgroup - 1), block.elected()  # me: which of the consumers
        a_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        b_desc = describe_rows(base + plan.own_b + me * (64 * 128))
        block.clear(acc_s, s_count)
        block.clear(acc_dp, s_count)
        block.clear(acc_a, a_count)
        block.clear(acc_b, b_count)
        block.clear(mask_bits, mask_words)
        block.clear(distance, 2)
        term = float32(0)
        if not of_keys:
            if chain.has_row_term:
                term = chain.row_term(word(base, B), word(base, H), arrays, strides)
            if config.wanted_aux:
                aux.start(run)
            lse_log2, minus_delta = local.array(2, float32), local.array(2, float32)
            loop.load_rows(base, arrays, strides, sizes, lse_log2, minus_delta)

        limit, states, i, member = loop.start(base, arrays, strides)
        n = int32(0)
        rings.own.consumer_wait(base, n)
        if cuts_keys:  # the first tile has the last keys: K past the valid ones <- 0
            rings.a.consumer_wait(base, n)
            keys_left = int32(word(base, KEYS) - i * config.tile_n)
            if i >= limit and keys_left < config.tile_n:
                zero_keys(base + plan.stream_a, keys_left)
        # Otherwise ptxas copies these zeros from the accumulators of S, which are zero as well, while S is being
        # computed.
        pin_s(acc_s)
        pin_s(acc_dp)
        pin_a(acc_a)
        pin_b(acc_b)
        products.issue_s(base, acc_s, a_desc, n, FALSE)
        asks = ahead(base, i, member, tile, arrays, strides, sizes)
        while (member < word(base, MEMBERS) if loop.early else n < limit) if of_keys else i >= limit:
            rings.b.consumer_wait(base, n)
            masked = i >= word(base, CUT) or i < word(base, FREE)
            if of_keys:
                lse_log2 = minus_delta = products.lse_and_delta_at(base, n)
                if chain.has_row_term:
                    term = chain.row_term(word(base, B), word(base, H) + member, arrays, strides)
            step = TileStep(n, i, member, masked, asks, lse_log2, minus_delta, term)
            to_ds(base, step, tile, b_desc, elected, arrays, strides, sizes, score)
            if of_p:
                products.issue_b(base, acc_b, p_frag, n)
            if of_ds:
                products.issue_a(base, acc_a, ds_frag, n)
            products.issue_s(base, acc_s, a_desc, int32(n + 1), FALSE)
            if loop.early:
                i, member = loop.following(base, i, member, limit, states, arrays, strides)
                i = int32(i)  # 64 bits without states of tiles
                asks = ahead(base, i, member, tile, arrays, strides, sizes)
            finish_sums(base, n, acc_a, acc_b, elected)
            n = int32(n + 1)
            if not loop.early:
                i, member = loop.following(base, i, member, limit, states, arrays, strides)
        wait_all()
        if config.wanted_aux:
            aux.finish_warp(run, arrays, sizes)

        if of_keys:
            write(base, acc_a, acc_b, arrays, strides, sizes, score)
        else:
            write(base, acc_a, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_backward(tensor_maps, arrays, strides, sizes, score):
        base = aligned(cuda.shared.array(0, uint8), config.ALIGNMENT)
        thread, warpgroup = special.thread_index(), warpgroup_index()
        if config.packed:  # the grid may have more blocks than the sequences have tiles
            if tiles.behind(special.block_index(), arrays, strides, sizes):
                griddepcontrol.wait()
                return
        if finds_by_kernels:
            griddepcontrol.wait()
        if thread == 0:
            set_up(base)
            work.write(base, special.block_index(), arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                producer.produce_a(base, arrays, strides, sizes)
            if thread == 32:
                producer.produce_b(base, arrays, strides)
        else:
            take_registers()
            griddepcontrol.wait()
            griddepcontrol.launch_dependents()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma_backward
