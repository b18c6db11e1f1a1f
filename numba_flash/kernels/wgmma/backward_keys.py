"""What a consumer of a block that owns a key tile does with a query tile, shared by wgmma/backward_dkdv and
wgmma/backward_fused: products, and at the end the gradients. backward_plain_scores.py has what lies between the
products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import bar, fence, ld_st, local, memory, special, wgmma
from ..score import fragments, kept_weights
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of
from ..steps.sequence import make as make_sequence
from ..steps.units import LOG2_E
from . import backward_key_outputs, backward_key_work, block, operands, pipeline
from .block import FIRST_ROW, H_KV, PART, B, H, rows_of_lane
from .operands import describe_rows


class KeyBlock(NamedTuple):
    """Device functions of a consumer warpgroup. n: number of a query tile among those that the block loads; work: where
    the words of the key tile are; place: the base, moved to where the gradients are staged."""

    lse_and_delta_at: Callable[..., Any]  # (base, n) -> the shared address of lse and -delta of its queries
    lse_factor_of: Callable[..., Any]  # (score) -> the negative factor from lse to units of Q K^T
    preload_s: Callable[..., Any]  # (base, acc_s, n, lse_factor)
    preload_dp: Callable[..., Any]  # (base, acc_dp, n)
    issue_s: Callable[..., Any]  # (base, acc_s, k_desc, n, none): waits for Q
    issue_dp: Callable[..., Any]  # (base, acc_dp, v_desc, n)
    issue_dv: Callable[..., Any]  # (base, acc_dv, p_frag, n)
    issue_dk: Callable[..., Any]  # (base, acc_dk, ds_frag, n)
    release_q: Callable[..., Any]  # (base, n)
    release_do: Callable[..., Any]  # (base, n, elected)
    find_kept: Callable[..., Any]  # (work, i, member, kept, arrays, sizes)
    term_of: Callable[..., Any]  # (work, member, arrays, strides)
    has_row_term: bool
    mask_words: int
    kept_words: int
    write_gradients: Callable[..., Any]  # (work, place, acc_dk, acc_dv, arrays, strides, sizes, score)


def zero_behind(config):
    """-> zero_behind(base, n, queries_left), a device function of all consumers, of packed sequences: Q and dO of the
    n-th query tile <- 0 from row queries_left on. There the next sequence begins, and 0 * NaN is NaN. Nobody reads them
    meanwhile: the consumers wait until all have S, and issue dP afterwards."""
    plan, rings, tile_m = config.shared_layout(), pipeline.of_backward(config), config.tile_m
    zero_q, zero_do = (
        block.tail_zeroer(config, -(-columns // 64), 4, tile_m)
        for columns in (config.head_dim_padded, config.head_dim_v_padded)
    )

    @inlined
    def zero(base, n, queries_left):
        if queries_left < tile_m:
            bar.sync(4, 128 * config.consumers)
            if config.of_dk:
                zero_q(base + plan.stream_a + rings.a.stage(n) * config.stream_a_bytes, queries_left)
            if config.of_dv:
                zero_do(base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes, queries_left)

    return zero


def make(config):
    tile_m, tile_n, plan = config.tile_m, config.tile_n, config.shared_layout()
    multiply_k_q = operands.rows_by_rows(config, tile_n, tile_m, config.head_dim_padded)
    multiply_v_do = operands.rows_by_rows(config, tile_n, tile_m, config.head_dim_v_padded)
    kind, row_steps = operands.kind(config), operands.row_steps(tile_m)
    multiply_ds_q = wgmma.product_registers(config.head_dim_padded, kind, row_steps, 1)
    multiply_p_do = wgmma.product_registers(config.head_dim_v_padded, kind, row_steps, 1)
    describe_columns = wgmma.descriptor(tile_m * 128, 1024, 128)
    # 1: the product is added to the accumulator's value
    to_lse, to_delta = int(config.lse_first), int(config.delta_first)

    word, _, position, *_ = block.words(plan.state)
    rings, sequence_of = pipeline.of_backward(config), make_sequence(config)
    head_parts_of = backward_key_work.make(config).head_parts_of
    mask_words = fragments.tile(config, 1, tile_m).mask_words  # columns are queries
    chain, count = fragments.chain(config), kept_weights.on_fragments(config, 1, tile_m)
    # If the next K and V arrive meanwhile, dK and dV are staged in the place of dS. Up to 64 columns they lie side by
    # side in one of its two buffers; above that one follows the other, each with a panel in both buffers.
    places = (plan.own_a, plan.own_b if config.of_dk else plan.own_a)
    if config.stays:
        places = (plan.ds, plan.ds + 64 * 128 if config.dq_panels == 1 else plan.ds)
    write_outputs = backward_key_outputs.make(config, tile_n, *places)

    @inlined
    def q_at(base, n):
        return base + plan.stream_a + rings.a.stage(n) * config.stream_a_bytes

    @inlined
    def do_at(base, n):
        return base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes

    @inlined
    def lse_and_delta_at(base, n):
        return base + plan.lse_delta + rings.a.stage(n) * config.lse_delta_bytes

    @inlined
    def numbers_of_lane(base, n):
        """The place of lse and -delta of the lane's first columns."""
        return lse_and_delta_at(base, n) + ((special.thread_index() & int32(3)) << 4)

    @inlined
    def preload(acc, place, factor):
        """acc (tile_m / 8, 4) <- factor * a number of each query; the columns are queries."""
        four = local.array(4, uint32)
        for pair in range(tile_m // 16):
            ld_st.load_v4(four, 0, place + pair * 128)
            for half in range(2):
                for x in range(2):
                    start = factor * four[half * 2 + x].view(np.float32)
                    for r in range(2):
                        acc[4 * (2 * pair + half) + 2 * r + x] = start

    @inlined
    def lse_factor_of(score):
        """The negative factor that converts lse from powers of 2 to units of Q K^T."""
        return float32(-1) / (score.scale * float32(LOG2_E)) if config.lse_first else float32(0)

    @inlined
    def preload_s(base, acc_s, n, lse_factor):
        """Waits for the n-th query tile; acc_s <- -lse / scale, to which S^T is added, so that P is 2^(scale_log2 *
        sum). The numbers are read during other products, and no exponential waits for them."""
        if config.lse_first:
            rings.a.consumer_wait(base, n)
            preload(acc_s, numbers_of_lane(base, n), lse_factor)

    @inlined
    def preload_dp(base, acc_dp, n):
        """acc_dp <- -delta, to which dP^T is added."""
        if config.delta_first:
            preload(acc_dp, numbers_of_lane(base, n) + 64, float32(1))

    @inlined
    def issue_s(base, acc_s, k_desc, n, none):
        """S^T of the n-th query tile, once it has arrived. With `none` K V^T instead, which is dropped: so consumers
        need no branch if no tile follows."""
        rings.a.consumer_wait(base, n)
        place = base + plan.own_b if none else q_at(base, n)
        multiply_k_q(acc_s, k_desc, describe_rows(place), to_lse)
        wgmma.commit_group()

    @inlined
    def issue_dp(base, acc_dp, v_desc, n):
        """dP^T of the n-th query tile, whose dO has arrived."""
        multiply_v_do(acc_dp, v_desc, describe_rows(do_at(base, n)), to_delta)
        wgmma.commit_group()

    @inlined
    def issue_dv(base, acc_dv, p_frag, n):
        """dV += P^T dO of the n-th query tile."""
        multiply_p_do(acc_dv, p_frag, describe_columns(do_at(base, n)), 1)
        wgmma.commit_group()

    @inlined
    def issue_dk(base, acc_dk, ds_frag, n):
        """dK += dS^T Q of the n-th query tile."""
        multiply_ds_q(acc_dk, ds_frag, describe_columns(q_at(base, n)), 1)
        wgmma.commit_group()

    @inlined
    def release_q(base, n):
        """A thread has finished with the n-th Q, lse and delta."""
        # Ordinary loads read lse and delta, and a bulk copy overwrites them. So every lane that has read them arrives.
        fence.proxy_async()
        rings.a.consumer_release(base, n, True)

    @inlined
    def release_do(base, n, elected):
        """A warp has finished with the n-th dO."""
        rings.b.consumer_release(base, n, elected)

    @inlined
    def find_kept(own, i, member, kept, arrays, sizes):
        """kept <- which of the lane's weights of query tile i count. own: the base, for words of the key tile."""
        if count.present:
            first_row, lane = rows_of_lane()
            first_key = word(own, FIRST_ROW)
            first_q_pos = int64(i) * tile_m + first_column_of(lane) + first_key - position(own)
            key, h = int32(first_key + first_row + first_row_of(lane)), int32(word(own, H) + member)
            count.of_keys(kept, first_q_pos, word(own, B), h, key, arrays, sizes)

    @inlined
    def term_of(base, member, arrays, strides):
        """The term that all scores of the head share (kernels/score/fragments.py)."""
        return chain.row_term(word(base, B), word(base, H) + member, arrays, strides)

    @inlined
    def leave_sums(own, acc, blocks, sums, sizes):
        """Stores acc (blocks, 4), in the layout of the registers, where add_parts reads it."""
        four = local.array(4, uint32)
        tiles, thread = divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n), special.thread_index() - 128
        all_parts = int64(word(own, B) * head_parts_of(sizes) + word(own, PART))
        tile = (all_parts * tiles + divide(word(own, FIRST_ROW), tile_n)) * (tile_n // 64) + (thread >> int32(7))
        at = (tile * blocks * 128 + (thread & int32(127))) * 4
        for column in range(blocks):
            for x in range(4):
                four[x] = acc[4 * column + x].view(np.uint32)
            memory.store_v4(memory.address(sums, at + column * 512), four, 0)

    @inlined
    def write_gradients(own, place, acc_dk, acc_dv, arrays, strides, sizes, score):
        """Writes dK and dV to global memory, staged in the place of the warpgroup's own rows of K and V. If other
        blocks have other heads of the group, writes their sums instead. own: as in find_kept; place: the base, moved
        to the dS whose place they take.

        All threads that read these rows must have done so.
        """
        if config.members:
            if config.of_dk:
                leave_sums(own, acc_dk, config.head_dim_padded // 8, arrays.dk_sums, sizes)
            if config.of_dv:
                leave_sums(own, acc_dv, config.head_dim_v_padded // 8, arrays.dv_sums, sizes)
        else:
            sequence = sequence_of(word(own, B), arrays, strides, sizes)
            h_kv, first_key = word(own, H_KV), word(own, FIRST_ROW)
            (first_row, lane) = rows_of_lane()
            write_outputs(
                place, acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score
            )

    return KeyBlock(
        lse_and_delta_at, lse_factor_of, preload_s, preload_dp, issue_s, issue_dp, issue_dv, issue_dk, release_q,
        release_do, find_kept, term_of, chain.has_row_term, mask_words, count.words, write_gradients,
    )  # fmt: skip
