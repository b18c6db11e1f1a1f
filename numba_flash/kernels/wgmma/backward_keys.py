"""The loop of a block that owns a key tile, shared by wgmma/backward_dkdv and wgmma/backward_fused.

The block loops over the query tiles that see its keys, for each query head of the group. The last tile comes first;
with config.both_ways the word STEP gives the direction.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import cvt, fence, griddepcontrol, ld_st, local, memory, special, tma, wgmma
from ..score import counts, fragments
from ..steps import lse_delta
from ..steps.inlined import inlined
from ..steps.integers import divide
from ..steps.plain import first_column_of, first_row_of
from ..steps.sequence import make as make_sequence
from ..steps.sequence import queries_of
from ..steps.units import LOG2_E
from . import (
    backward_key_outputs,
    backward_key_work,
    backward_producer,
    backward_query_walk,
    backward_state,
    bias_boxes,
)
from .backward_producer import DO_MAP, K_MAP, Q_MAP, V_MAP
from .backward_state import BATCH, BEGIN, FIRST_ROW, HEAD, HEAD_KV, MEMBERS, PART, STEP, STOP


class KeyBlock(NamedTuple):
    """Device functions."""

    first_tile: Any
    following_tile: Any
    of_word: Any
    produce_a: Any
    produce_no_a: Any
    produce_b: Any
    lse_factor_of: Any
    preload_s: Any
    preload_dp: Any
    issue_s: Any
    issue_dp: Any
    issue_dv: Any
    issue_dk: Any
    release_q: Any
    release_do: Any
    rows_of_lane: Any
    weights_of: Any
    to_score_gradients: Any
    find_visible: Any
    find_kept: Any
    term_of: Any
    has_row_term: bool
    mask_words: int
    kept_words: int
    write_gradients: Any


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    head_dim_padded, head_dim_v_padded = config.head_dim_padded, config.head_dim_v_padded
    of_dk, of_dv, both_ways = config.of_dk, config.of_dv, config.both_ways
    plan = config.shared_layout()
    lse_delta_bytes, members_of_part = config.lse_delta_bytes, config.members
    fetch_bias = bias_boxes.make(config, tile_m, of_keys=True).fetch
    blocks, varies = tile_m // 8, config.derivative_varies
    lse_first, delta_first = config.lse_first, config.delta_first

    # 16 columns are 32 bytes of a panel's row, and a panel has 64 columns; offsets are in units of 16 bytes.
    kind = "f16" if config.dtype == "float16" else "bf16"
    own_panel, stream_panel = tile_n * 128, tile_m * 128
    own_steps = tuple(
        ((x % 4) * 32 + (x // 4) * own_panel) >> 4 for x in range(max(head_dim_padded, head_dim_v_padded) // 16)
    )
    stream_steps = tuple(
        ((x % 4) * 32 + (x // 4) * stream_panel) >> 4 for x in range(max(head_dim_padded, head_dim_v_padded) // 16)
    )
    row_steps = tuple((y * 16 * 128) >> 4 for y in range(tile_m // 16))
    a_bytes, b_bytes = config.stream_a_bytes, config.stream_b_bytes
    multiply_k_q = wgmma.product_shared(
        tile_m, kind, own_steps[: head_dim_padded // 16], stream_steps[: head_dim_padded // 16], 0
    )
    multiply_v_do = wgmma.product_shared(
        tile_m, kind, own_steps[: head_dim_v_padded // 16], stream_steps[: head_dim_v_padded // 16], 0
    )
    multiply_ds_q = wgmma.product_registers(head_dim_padded, kind, row_steps, 1)
    multiply_p_do = wgmma.product_registers(head_dim_v_padded, kind, row_steps, 1)
    describe_rows = wgmma.descriptor(16, 1024, 128)  # the first number is not used
    describe_columns = wgmma.descriptor(stream_panel, 1024, 128)
    to_lse, to_delta = int(lse_first), int(delta_first)  # 1: the product is added to the accumulator's value

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    thread_index, address, store_v4 = special.thread_index, memory.address, memory.store_v4
    row_blocks, block_words = lse_delta.row_blocks, lse_delta.BLOCK_WORDS

    _, _, word, position = backward_state.words(config)
    rings, sequence_of = backward_state.pipelines(config), make_sequence(config)
    own_maps = (K_MAP, V_MAP if of_dk else None)
    load_own, load_a, load_b = backward_producer.make(config, own_maps, (Q_MAP, DO_MAP))
    head_parts_of = backward_key_work.make(config).head_parts_of
    mask_words, visible, _, _ = fragments.tile(config, 1, tile_m)  # columns are queries
    chain, (weight, _) = fragments.chain(config), (None, None) if config.has("bias") else fragments.weights(config)
    # If the next K and V arrive meanwhile, dK and dV are staged in the place of dS. Up to 64 columns they lie side by
    # side in one of its two buffers; above that one follows the other, each with a panel in both buffers.
    places = (plan.own_a, plan.own_b if of_dk else plan.own_a)
    if config.stays:
        places = (plan.ds, plan.ds + 64 * 128 if config.dq_panels == 1 else plan.ds)
    count = counts.on_fragments(config, 1, tile_m)
    drops, kept_of = count.present, count.of_keys
    write_outputs = backward_key_outputs.make(config, tile_n, *places)
    walk = backward_query_walk.make(config, whole_warp=False)

    @inlined
    def of_word(base, which):
        """A word of the block's state, for one thread. It is read again each time, because the thread has few
        registers."""
        return int32(ld_st.load_b32(int32(base + plan.state + which)))

    @inlined
    def first_tile(begin, stop, step):
        return int32(stop - 1 if step < 0 else begin)

    @inlined
    def following_tile(i, member, step, members):
        """-> (query tile, member) after tile i of member, with config.both_ways: each tile of all members comes before
        the next tile. So blocks that are some tiles apart stay so, even if some have more tiles than others."""
        member = int32(member + 1)
        if member == members:
            i, member = int32(i + step), int32(0)
        return i, member

    @inlined
    def start_of(own):
        """The query tile with which a thread that loads begins."""
        return first_tile(of_word(own, BEGIN), of_word(own, STOP), of_word(own, STEP) if both_ways else int32(-1))

    @inlined
    def advance(own, i, member):
        """following_tile for a thread that loads. Blocks that go one way process all tiles of a member first."""
        if both_ways:
            i, member = following_tile(i, member, of_word(own, STEP), of_word(own, MEMBERS))
        else:
            i = int32(i - 1)
            if i < of_word(own, BEGIN):
                i, member = int32(of_word(own, STOP) - 1), int32(member + 1)
        return i, member

    @inlined
    def load_keys(base, own):
        """Loads K and V."""
        load_own(base, of_word(own, FIRST_ROW), of_word(own, HEAD_KV), of_word(own, BATCH))

    @inlined
    def produce_a(base, own, n, w, arrays, strides, sizes):
        """One thread: K and V of the block's w-th tile; then Q with its lse, -delta and bias, tile after tile of each
        head. n: the number of Q tiles loaded before. From the second key tile on, a Q is loaded before K and V, because
        consumers release K and V last. -> n"""
        tile_row_blocks, waits = tile_m // 16, config.stays and w > 0
        if not waits:
            load_keys(base, own)
        member, i = int32(0), start_of(own)
        if walk.present:
            i, member = walk.up_to(own, i, member, arrays, strides)
        while member < of_word(own, MEMBERS) and of_word(own, BEGIN) <= i < of_word(own, STOP):
            h = int32(of_word(own, HEAD) + member)
            # masks hide what lies past the last block
            blocks_left = int32(row_blocks(sizes.seqlen_q) - i * tile_row_blocks)
            count = int32(min(blocks_left, int32(tile_row_blocks)) * int32(4 * block_words))
            stage = load_a(base, n, int32(i * tile_m), h, of_word(own, BATCH), int32(count + config.bias_bytes))
            if n == 0:
                griddepcontrol.wait()  # it writes lse and delta
            sequence = queries_of(of_word(own, BATCH), arrays, strides, sizes)
            tma.load_bytes(
                base + plan.lse_delta + stage * lse_delta_bytes,
                address(arrays.lse_delta, lse_delta.row_block(sequence, h, i * tile_row_blocks, sizes)),
                rings.a.full(base, n),
                count,
            )
            if config.bias_boxes:
                to, full = base + plan.bias + stage * config.bias_bytes, rings.a.full(base, n)
                fetch_bias(to, full, int32(i * tile_m), of_word(own, FIRST_ROW), h, sequence.b, strides)
            if waits:
                rings.own.producer_acquire(base, w)
                load_keys(base, own)
                waits = False
            n = int32(n + 1)
            if walk.present:
                i, member = walk.up_to(own, int32(i - 1), member, arrays, strides)
            else:
                i, member = advance(own, i, member)
        if waits:
            rings.own.producer_acquire(base, w)
            load_keys(base, own)
        return n

    @inlined
    def produce_no_a(base, n, seqlen_q):
        """After the last Q loads one past the end, zeros: its S is issued and dropped, so that consumers need no
        branch."""
        load_a(base, n, int32((divide(int32(seqlen_q), tile_m) + 1) * tile_m), 0, 0, 0)

    @inlined
    def produce_b(base, own, n, arrays, strides):
        """One thread of another warp, so that neither producer waits for the other: dO. -> n"""
        member, i = int32(0), start_of(own)
        if walk.present:
            i, member = walk.up_to(own, i, member, arrays, strides)
        while member < of_word(own, MEMBERS) and of_word(own, BEGIN) <= i < of_word(own, STOP):
            h = int32(of_word(own, HEAD) + member)
            load_b(base, n, int32(i * tile_m), h, of_word(own, BATCH))
            n = int32(n + 1)
            if walk.present:
                i, member = walk.up_to(own, int32(i - 1), member, arrays, strides)
            else:
                i, member = advance(own, i, member)
        return n

    @inlined
    def preload(acc, place, factor):
        """acc (tile_m / 8, 4) <- factor * a number of each query; the columns are queries."""
        four = local.array(4, uint32)
        for pair in range(blocks // 2):
            ld_st.load_v4(four, 0, place + pair * 128)
            for half in range(2):
                for x in range(2):
                    start = factor * four[half * 2 + x].view(np.float32)
                    for r in range(2):
                        acc[4 * (2 * pair + half) + 2 * r + x] = start

    @inlined
    def lse_factor_of(score):
        """The negative factor that converts lse from powers of 2 to units of Q K^T."""
        return float32(-1) / (score.scale * float32(LOG2_E)) if lse_first else float32(0)

    @inlined
    def preload_s(base, acc_s, n, lse_factor):
        """Waits for the n-th query tile; acc_s <- -lse / scale, to which S^T is added, so that P is 2^(scale_log2 *
        sum). The numbers are read during other products, and no exponential waits for them."""
        if lse_first:
            rings.a.consumer_wait(base, n)
            place = base + plan.lse_delta + rings.a.stage(n) * lse_delta_bytes + ((thread_index() & int32(3)) << 4)
            preload(acc_s, place, lse_factor)

    @inlined
    def preload_dp(base, acc_dp, n):
        """acc_dp <- -delta, to which dP^T is added."""
        if delta_first:
            place = base + plan.lse_delta + rings.a.stage(n) * lse_delta_bytes + ((thread_index() & int32(3)) << 4)
            preload(acc_dp, place + 64, float32(1))

    @inlined
    def issue_s(base, acc_s, k_desc, n, none):
        """S^T of the n-th query tile, once it has arrived. With `none` K V^T instead, which is dropped: so consumers
        need no branch if no tile follows."""
        rings.a.consumer_wait(base, n)
        place = base + (plan.own_b if none else plan.stream_a + rings.a.stage(n) * a_bytes)
        multiply_k_q(acc_s, k_desc, describe_rows(place), to_lse)
        wgmma.commit_group()

    @inlined
    def issue_dp(base, acc_dp, v_desc, n):
        """dP^T of the n-th query tile, whose dO has arrived."""
        multiply_v_do(acc_dp, v_desc, describe_rows(base + plan.stream_b + rings.b.stage(n) * b_bytes), to_delta)
        wgmma.commit_group()

    @inlined
    def issue_dv(base, acc_dv, p_frag, n):
        """dV += P^T dO of the n-th query tile."""
        multiply_p_do(acc_dv, p_frag, describe_columns(base + plan.stream_b + rings.b.stage(n) * b_bytes), 1)
        wgmma.commit_group()

    @inlined
    def issue_dk(base, acc_dk, ds_frag, n):
        """dK += dS^T Q of the n-th query tile."""
        multiply_ds_q(acc_dk, ds_frag, describe_columns(base + plan.stream_a + rings.a.stage(n) * a_bytes), 1)
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
    def rows_of_lane():
        """-> (the warp's first row in the key tile, lane). Computed again on each call, to save registers."""
        thread = thread_index() - 128
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def is_seen(mask_bits, r, n, x):
        return (mask_bits[r * (mask_words // 2) + n // 16] >> uint32(2 * (n % 16) + x)) & uint32(1) != 0

    def weights_of(first, end):
        """-> to_weights for pairs [first, end) of 8 queries each."""

        @inlined
        def to_weights(acc_s, p_frag, lse_and_delta, mask_bits, term, distance, score, masked):
            """acc_s <- P^T. Without dK, which needs it for dS, also p_frag <- the same in 16 bits.

            If the score has a derivative that is not constant, acc_s keeps S, which is needed again.
            """
            if varies and of_dk:
                return
            four = local.array(4, uint32)
            p = local.array(2, float32)
            place = lse_and_delta + ((thread_index() & int32(3)) << 4)
            for pair in range(first, end):
                if not lse_first:
                    ld_st.load_v4(four, 0, place + pair * 128)
                for half in range(2):
                    n = 2 * pair + half
                    for r in range(2):
                        for x in range(2):
                            i = 4 * n + 2 * r + x
                            lse_log2 = float32(0) if lse_first else four[half * 2 + x].view(np.float32)
                            away = distance[0] - float32((n - r) * 8 + x)
                            p[x], _ = weight(acc_s[i], term, away, score, lse_log2)
                            if masked and not is_seen(mask_bits, r, n, x):
                                p[x] = float32(0)
                            if not varies:
                                acc_s[i] = p[x]
                        if not of_dk:
                            p_frag[2 * n + r] = pack(p[0], p[1])

        return to_weights

    @inlined
    def to_score_gradients(
        acc_s, acc_dp, p_frag, ds_frag, lse_and_delta, mask_bits, kept, term, distance, score, masked
    ):
        """ds_frag <- dS^T in 16 bits, p_frag <- P^T. P^T is rounded only here, so that fewer registers are live at a
        time."""
        four = local.array(4, uint32)
        p = local.array(2, float32)
        ds = local.array(2, float32)
        place = lse_and_delta + ((thread_index() & int32(3)) << 4)
        for pair in range(blocks // 2):
            if varies:
                lse = local.array(4, uint32)
                ld_st.load_v4(lse, 0, place + pair * 128)
            if not delta_first:
                ld_st.load_v4(four, 0, place + pair * 128 + 64)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        minus_delta = float32(0) if delta_first else four[half * 2 + x].view(np.float32)
                        if varies:
                            away = distance[0] - float32((n - r) * 8 + x)
                            lse_log2 = lse[half * 2 + x].view(np.float32)
                            p[x], derivative = weight(acc_s[i], term, away, score, lse_log2)
                            ds[x] = p[x] * (acc_dp[i] + minus_delta) * derivative
                            if masked and not is_seen(mask_bits, r, n, x):
                                p[x] = float32(0)
                        elif drops:
                            counts_here = uint32(kept[r] & uint32(1 << (2 * n + x))) != uint32(0)
                            dp = acc_dp[i] if counts_here else float32(0)
                            ds[x] = acc_s[i] * (dp * score.kept_count + minus_delta)
                            p[x] = acc_s[i] if counts_here else float32(0)
                        else:
                            p[x] = acc_s[i]
                            ds[x] = p[x] * (acc_dp[i] + minus_delta)
                        # Where weights drop, mask_bits would take too many registers; P is 0 where they hide a score.
                        if masked and (acc_s[i] == 0 if drops else not is_seen(mask_bits, r, n, x)):
                            ds[x] = float32(0)  # dP may be NaN there
                    if of_dv:
                        p_frag[2 * n + r] = pack(p[0], p[1])
                    ds_frag[2 * n + r] = pack(ds[0], ds[1])

    @inlined
    def find_visible(own, i, sizes, mask_bits, distance):
        """mask_bits <- which of the lane's scores of query tile i count; distance <- q_pos - k_pos. own: the base, for
        words of the key tile."""
        first_row, lane = rows_of_lane()
        # seen from the keys, left and right are exchanged
        left, right, seqlen_q = sizes.right, sizes.left, sizes.seqlen_q
        visible(i, first_row, lane, position(own), left, right, seqlen_q, mask_bits, distance)

    @inlined
    def find_kept(own, i, member, kept, arrays, sizes):
        """kept <- which of the lane's weights of query tile i count. own: as in find_visible."""
        if drops:
            first_row, lane = rows_of_lane()
            first_key = word(own, FIRST_ROW)
            first_q_pos = int64(i) * tile_m + first_column_of(lane) + first_key - position(own)
            key, h = int32(first_key + first_row + first_row_of(lane)), int32(word(own, HEAD) + member)
            kept_of(kept, first_q_pos, word(own, BATCH), h, key, arrays, sizes)

    @inlined
    def term_of(base, member, arrays, strides):
        """The term that all scores of the head share (kernels/score/fragments.py)."""
        return chain.row_term(word(base, BATCH), word(base, HEAD) + member, arrays, strides)

    @inlined
    def leave_sums(own, acc, blocks, sums, sizes):
        """Stores acc (blocks, 4), in the layout of the registers, where add_parts reads it."""
        four = local.array(4, uint32)
        tiles, thread = divide(int32(sizes.seqlen_k) + int32(tile_n - 1), tile_n), thread_index() - 128
        all_parts = int64(word(own, BATCH) * head_parts_of(sizes) + word(own, PART))
        tile = (all_parts * tiles + divide(word(own, FIRST_ROW), tile_n)) * (tile_n // 64) + (thread >> int32(7))
        at = (tile * blocks * 128 + (thread & int32(127))) * 4
        for block in range(blocks):
            for x in range(4):
                four[x] = acc[4 * block + x].view(np.uint32)
            store_v4(address(sums, at + block * 512), four, 0)

    @inlined
    def write_gradients(own, place, acc_dk, acc_dv, arrays, strides, sizes, score):
        """Writes dK and dV to global memory, staged in the place of the warpgroup's own rows of K and V. If other
        blocks have other heads of the group, writes their sums instead. own: as in find_visible; place: the base, moved
        to the dS whose place they take.

        All threads that read these rows must have done so.
        """
        if members_of_part:
            if of_dk:
                leave_sums(own, acc_dk, head_dim_padded // 8, arrays.dk_sums, sizes)
            if of_dv:
                leave_sums(own, acc_dv, head_dim_v_padded // 8, arrays.dv_sums, sizes)
        else:
            sequence = sequence_of(word(own, BATCH), arrays, strides, sizes)
            h_kv, first_key = word(own, HEAD_KV), word(own, FIRST_ROW)
            (first_row, lane) = rows_of_lane()
            write_outputs(
                place, acc_dk, acc_dv, first_row, lane, sequence, h_kv, first_key, arrays, strides, sizes, score
            )

    return KeyBlock(
        first_tile, following_tile, of_word, produce_a, produce_no_a, produce_b, lse_factor_of,
        preload_s, preload_dp, issue_s, issue_dp, issue_dv, issue_dk, release_q, release_do, rows_of_lane, weights_of,
        to_score_gradients, find_visible, find_kept, term_of, chain.has_row_term, mask_words, count.words,
        write_gradients,
    )  # fmt: skip
