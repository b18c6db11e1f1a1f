"""dQ for Hopper (sm_90a): TMA loads tiles, wgmma multiplies them.

Read wgmma/backward_dkdv first. It is listing 8 of docs/algorithm.md. A block owns a query tile of one head. It loops
over the key tiles that the queries see, the last one first:

    S = Q K^T      P = 2^(scale_log2 S - lse_log2)                   line 6
    dP = dO V^T    dS = P * (dP - delta)                             lines 7 and 8
    dQ += dS K                         and at the end dQ *= scale    lines 9 and 10

Each consumer warpgroup owns 64 queries. The elements of dS that a lane holds are, rounded to 16 bits, those it needs of
the A operand of dS K. K is read from shared memory twice, once as rows and once as columns.

Consumers wait for the previous kernel at the start. With the bits of a mask or the states of tiles all threads do, as
in wgmma/backward_dkdv. Producers load Q, dO, K and V, which no backward kernel writes.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory; tensor
maps of q, k, v and do. dq is contiguous.
"""

import math

from numba import cuda, float32, int32, uint8, uint32

from ...ptx import bar, cvt, fence, griddepcontrol, ld_st, local, setmaxnreg, shared, shfl, special, wgmma
from ..recompute import queries as recompute
from ..score import fragments, tile_walk
from ..steps import gradient_rows, lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import first_row_of
from ..steps.query_tile import QueryTile
from ..steps.sequence import queries_of, query_row
from . import backward_producer, backward_query_work, backward_scores, backward_state, bias_boxes
from .backward_producer import DO_MAP, K_MAP, Q_MAP, V_MAP
from .backward_scores import Own
from .backward_state import BATCH, BEGIN, CUT, FIRST_ROW, FREE, HEAD, HEAD_KV, KEYS, STATES, STOP


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    head_dim_padded, head_dim_v_padded, head_dim = config.head_dim_padded, config.head_dim_v_padded, config.head_dim
    alignment, all_consumers = config.ALIGNMENT, 128 * config.consumers
    plan = config.shared_layout()
    s_count, frag_count, blocks, dq_count = tile_n // 2, tile_n // 4, tile_n // 8, head_dim_padded // 2
    varies, padded = config.derivative_varies, config.has("seqlens_k")

    # 16 columns are 32 bytes of a panel's row, and a panel has 64 columns; offsets are in units of 16 bytes.
    kind = "f16" if config.dtype == "float16" else "bf16"
    own_panel, stream_panel = tile_m * 128, tile_n * 128
    own_steps = tuple(
        ((x % 4) * 32 + (x // 4) * own_panel) >> 4 for x in range(max(head_dim_padded, head_dim_v_padded) // 16)
    )
    stream_steps = tuple(
        ((x % 4) * 32 + (x // 4) * stream_panel) >> 4 for x in range(max(head_dim_padded, head_dim_v_padded) // 16)
    )
    row_steps = tuple((y * 16 * 128) >> 4 for y in range(tile_n // 16))
    k_panels, a_bytes, b_bytes = -(-head_dim_padded // 64), config.stream_a_bytes, config.stream_b_bytes
    boxed, fetch_bias, bias_bytes = config.bias_boxes, bias_boxes.make(config, tile_m).fetch, config.bias_bytes
    multiply_q_k = wgmma.product_shared(
        tile_n, kind, own_steps[: head_dim_padded // 16], stream_steps[: head_dim_padded // 16], 0
    )
    multiply_do_v = wgmma.product_shared(
        tile_n, kind, own_steps[: head_dim_v_padded // 16], stream_steps[: head_dim_v_padded // 16], 0
    )
    multiply_ds_k = wgmma.product_registers(head_dim_padded, kind, row_steps, 1)
    describe_rows = wgmma.descriptor(16, 1024, 128)  # the first number is not used
    describe_columns = wgmma.descriptor(stream_panel, 1024, 128)
    commit, wait_all, wait_but_one = wgmma.commit_group, wgmma.wait_group(0), wgmma.wait_group(1)
    pin_s, pin_dq = wgmma.pin(s_count), wgmma.pin(dq_count)

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    finds_by_kernels = config.has("mask") or bool(config.tile_states)  # previous kernels write what determines the work
    inf = float32(math.inf)

    set_up, _, _, word, position = backward_state.make(config)
    rings = backward_state.pipelines(config)
    load_own, load_a, load_b = backward_producer.make(config, (Q_MAP, DO_MAP), (K_MAP, V_MAP))
    set_up_state = backward_query_work.make(config)
    mask_words, visible, _, _ = fragments.tile(config, 1)
    chain, (weight, _) = fragments.chain(config), (None, None) if config.by_element else fragments.weights(config)
    stage_dq, store_dq = gradient_rows.make(config.dtype, tile_m, 16, head_dim, head_dim % 8 == 0)
    recompute_queries = recompute.make(config)
    by_element, scores = config.by_element, backward_scores.make(config, of_keys=False)
    bits_words, shown_words, kept_words, bias_words = scores.words if by_element else (1, 1, 1, 1)
    of_thread, of_warp = tile_walk.make(config), tile_walk.make(config, whole_warp=True)

    @inlined
    def of_word(base, which):
        """A word of the block's state, for one thread. It is read again each time, because the thread has few
        registers."""
        return int32(ld_st.load_b32(int32(base + plan.state + which)))

    @inlined
    def behind_of(base, j, arrays, strides):
        """The key tile after j, for one thread."""
        if of_thread.present:
            states, begin = of_word(base, STATES), of_word(base, BEGIN)
            return int32(of_thread.next_tile(states, j, begin, arrays, strides))
        return int32(j - 1)

    @inlined
    def produce_a(base, arrays, strides, seqlen_k):
        """One thread: Q and dO, then K with its bias, tile after tile. After the last tile it loads a K past the end,
        which is zeros: its S is issued and dropped, so that consumers need no branch."""
        load_own(base, of_word(base, FIRST_ROW), of_word(base, HEAD), of_word(base, BATCH))
        n, j = int32(0), int32(of_word(base, STOP) - 1)
        while j >= of_word(base, BEGIN):
            first_key, b = int32(j * tile_n), of_word(base, BATCH)
            stage = load_a(base, n, first_key, of_word(base, HEAD_KV), b, bias_bytes)
            if boxed:
                to, full = base + plan.bias + stage * bias_bytes, rings.a.full(base, n)
                fetch_bias(to, full, of_word(base, FIRST_ROW), first_key, of_word(base, HEAD), b, strides)
            n, j = int32(n + 1), behind_of(base, j, arrays, strides)
        load_a(base, n, int32((divide(int32(seqlen_k), tile_n) + 1) * tile_n), 0, 0, 0)

    @inlined
    def produce_b(base, arrays, strides):
        """One thread of another warp, so that neither producer waits for the other: V."""
        n, j = int32(0), int32(of_word(base, STOP) - 1)
        while j >= of_word(base, BEGIN):
            load_b(base, n, int32(j * tile_n), of_word(base, HEAD_KV), of_word(base, BATCH))
            n, j = int32(n + 1), behind_of(base, j, arrays, strides)

    @inlined
    def issue_s(base, acc_s, q_desc, n):
        """S of the n-th key tile, which has arrived."""
        multiply_q_k(acc_s, q_desc, describe_rows(base + plan.stream_a + rings.a.stage(n) * a_bytes), 0)
        commit()

    @inlined
    def issue_dp(base, acc_dp, do_desc, n):
        """dP of the n-th key tile, whose V has arrived."""
        multiply_do_v(acc_dp, do_desc, describe_rows(base + plan.stream_b + rings.b.stage(n) * b_bytes), 0)
        commit()

    @inlined
    def issue_dq(base, acc_dq, ds_frag, n):
        """dQ += dS K of the n-th key tile."""
        multiply_ds_k(acc_dq, ds_frag, describe_columns(base + plan.stream_a + rings.a.stage(n) * a_bytes), 1)
        commit()

    @inlined
    def wait_for_k(base, n):
        rings.a.consumer_wait(base, n)

    @inlined
    def release_k(base, n, elected):
        """A warp has finished with the n-th K. With a bias beside K, which all lanes read, every lane arrives."""
        if boxed:
            fence.proxy_async()
            rings.a.consumer_release(base, n, True)
        else:
            rings.a.consumer_release(base, n, elected)

    @inlined
    def release_v(base, n, elected):
        """A warp has finished with the n-th V."""
        rings.b.consumer_release(base, n, elected)

    @inlined
    def zero_tail(base, rows, thread):
        """All consumers set rows of the first K to 0, from `rows` on. They may hold NaN, and 0 * NaN is NaN."""
        zeros = local.array(4, uint32)
        for x in range(4):
            zeros[x] = uint32(0)
        for index in range(rows * 8 + thread, tile_n * 8, all_consumers):
            for panel in range(k_panels):
                ld_st.store_v4(base + plan.stream_a + panel * stream_panel + index * 16, zeros, 0)
        fence.proxy_async()
        bar.sync(4, all_consumers)

    @inlined
    def rows_of_lane():
        """-> (the warp's first row in the query tile, lane). Computed again on each call, to save registers."""
        thread = special.thread_index() - 128
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def load_lse_delta(base, arrays, strides, sizes, lse_log2, minus_delta):
        """Loads lse and -delta of the lane's two rows."""
        first_row, lane = rows_of_lane()
        sequence, h = queries_of(word(base, BATCH), arrays, strides, sizes), word(base, HEAD)
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse_log2[r] = inf
            minus_delta[r] = float32(0)
            if query < sequence.seqlen_q:
                row = lse_delta.block_row(sequence, h, query, sizes)
                lse_log2[r] = arrays.lse_delta[row]
                minus_delta[r] = arrays.lse_delta[row + lse_delta.MINUS_DELTA]

    @inlined
    def is_seen(mask_bits, r, n, x):
        return (mask_bits[r * (mask_words // 2) + n // 16] >> uint32(2 * (n % 16) + x)) & uint32(1) != 0

    @inlined
    def to_weights(acc_s, lse_log2, mask_bits, term, distance, score, masked):
        """acc_s <- P. If the score has a derivative that is not constant, acc_s keeps S, which is needed again."""
        if not varies:
            for n in range(blocks):
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        p, _ = weight(acc_s[i], term, distance[0] - float32((n - r) * 8 + x), score, lse_log2[r])
                        if masked and not is_seen(mask_bits, r, n, x):
                            p = float32(0)
                        acc_s[i] = p

    @inlined
    def to_score_gradients(acc_s, acc_dp, ds_frag, lse_log2, minus_delta, mask_bits, term, distance, score, masked):
        """ds_frag <- dS in 16 bits."""
        ds = local.array(2, float32)
        for n in range(blocks):
            for r in range(2):
                for x in range(2):
                    i = 4 * n + 2 * r + x
                    if varies:
                        away = distance[0] - float32((n - r) * 8 + x)
                        p, derivative = weight(acc_s[i], term, away, score, lse_log2[r])
                        ds[x] = p * (acc_dp[i] + minus_delta[r]) * derivative
                    else:
                        ds[x] = acc_s[i] * (acc_dp[i] + minus_delta[r])
                    if masked and not is_seen(mask_bits, r, n, x):
                        ds[x] = float32(0)  # dP may be NaN there
                ds_frag[2 * n + r] = pack(ds[0], ds[1])

    @inlined
    def find_visible(base, j, sizes, mask_bits, distance):
        """mask_bits <- which of the lane's scores of key tile j count; distance <- q_pos - k_pos."""
        first_row, lane = rows_of_lane()
        left, right, keys = sizes.left, sizes.right, word(base, KEYS)
        visible(j, first_row, lane, position(base), left, right, keys, mask_bits, distance)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 queries of the block's tile."""
        acc_s = local.array(s_count, float32)  # (tile_n / 8, 4)
        acc_dp = local.array(s_count, float32)  # (tile_n / 8, 4)
        acc_dq = local.array(dq_count, float32)  # (head_dim_padded / 8, 4)
        ds_frag = local.array(frag_count, uint32)  # (tile_n / 8, 2)
        mask_bits = local.array(mask_words, uint32)
        distance = local.array(2, float32)
        lse_log2 = local.array(2, float32)
        minus_delta = local.array(2, float32)
        me = int32(warpgroup - 1)  # index of the consumer
        elected = special.thread_index() & int32(31) == 0
        q_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        do_desc = describe_rows(base + plan.own_b + me * (64 * 128))
        for x in range(s_count):
            acc_s[x] = float32(0)
            acc_dp[x] = float32(0)
        for x in range(dq_count):
            acc_dq[x] = float32(0)
        for x in range(mask_words):
            mask_bits[x] = uint32(0)
        for r in range(2):
            distance[r] = float32(0)
        own = Own(
            local.array(bits_words, uint32),
            local.array(shown_words, uint32),
            local.array(kept_words, uint32),
            local.array(bias_words, uint32),  # (2, tile_n / 8, 2), in 16 bits two in one
        )
        term = float32(0)
        if chain.has_row_term:
            term = chain.row_term(word(base, BATCH), word(base, HEAD), arrays, strides)
        load_lse_delta(base, arrays, strides, sizes, lse_log2, minus_delta)

        begin = word(base, BEGIN)
        states = word(base, STATES) if of_thread.present else int32(0)
        j = int32(word(base, STOP) - 1)
        n = int32(0)
        rings.own.consumer_wait(base, 0)
        wait_for_k(base, n)
        if padded:
            keys_left = int32(word(base, KEYS) - j * tile_n)
            if j >= begin and keys_left < tile_n:
                zero_tail(base, keys_left, special.thread_index() - 128)
        pin_s(acc_s)
        pin_s(acc_dp)
        pin_dq(acc_dq)
        issue_s(base, acc_s, q_desc, n)
        while j >= begin:
            rings.b.consumer_wait(base, n)
            masked = j >= word(base, CUT) or j < word(base, FREE)
            if by_element:
                asked = of_warp.needs_mask(states, j, arrays, strides) if of_thread.present else FALSE
                every = scores.prepare(base, j, 0, own, distance, masked, asked, arrays, strides, sizes)
            elif chain.has_row_term or masked:
                find_visible(base, j, sizes, mask_bits, distance)
            wait_all()
            pin_s(acc_s)
            issue_dp(base, acc_dp, do_desc, n)
            if by_element:
                bias = base + plan.bias + rings.a.stage(n) * bias_bytes
                scores.to_weights(
                    base, j, 0, acc_s, ds_frag, lse_log2, bias, own, term, distance, every, arrays, strides, score
                )
            elif masked:
                to_weights(acc_s, lse_log2, mask_bits, term, distance, score, TRUE)
            else:
                to_weights(acc_s, lse_log2, mask_bits, term, distance, score, FALSE)
            wait_all()
            pin_s(acc_dp)
            release_v(base, n, elected)
            if by_element:
                scores.to_gradients(acc_s, acc_dp, ds_frag, ds_frag, minus_delta, own, every, score)
            elif masked:
                to_score_gradients(
                    acc_s, acc_dp, ds_frag, lse_log2, minus_delta, mask_bits, term, distance, score, TRUE
                )
            else:
                to_score_gradients(
                    acc_s, acc_dp, ds_frag, lse_log2, minus_delta, mask_bits, term, distance, score, FALSE
                )
            issue_dq(base, acc_dq, ds_frag, n)
            wait_for_k(base, int32(n + 1))
            issue_s(base, acc_s, q_desc, int32(n + 1))
            wait_but_one()
            pin_dq(acc_dq)
            release_k(base, n, elected)
            n = int32(n + 1)
            j = int32(of_warp.next_tile(states, j, begin, arrays, strides) if of_thread.present else j - 1)
        wait_all()

        # Stage dQ in the place of the warpgroup's own rows of Q, and write it from there to global memory.
        bar.sync(me + 1, 128)  # all four warps have read these rows for the last time
        first_row, lane = rows_of_lane()
        tile = QueryTile(word(base, BATCH), word(base, HEAD), word(base, FIRST_ROW), int32(0))
        sequence = queries_of(tile.b, arrays, strides, sizes)
        queries_left = int32(min(sequence.seqlen_q - tile.first_query, tile_m))
        nonfinite = stage_dq(acc_dq, score.scale, base + plan.own_a, first_row, lane, queries_left)
        to, row = query_row(strides.dq, sequence, tile.h, tile.first_query), strides.dq[2]
        store_dq(base + plan.own_a, first_row, lane, arrays.dq, to, row, queries_left, head_dim, nonfinite)
        if nonfinite != 0:
            recompute_queries(nonfinite, first_row, lane, tile, term, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_dq(tensor_maps, arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared.address(smem) + int32(alignment - 1)) & int32(-alignment))
        thread = special.thread_index()
        warpgroup = int32(shfl.idx_b32(uint32(thread >> int32(7)), 0))  # known to be uniform in the warp
        if finds_by_kernels:
            griddepcontrol.wait()
        if thread == 0:
            set_up(base)
            fence.mbarrier_init()
            set_up_state(base, arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                produce_a(base, arrays, strides, sizes.seqlen_k)
            if thread == 32:
                produce_b(base, arrays, strides)
        else:
            take_registers()
            griddepcontrol.wait()
            griddepcontrol.launch_dependents()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma_dq
