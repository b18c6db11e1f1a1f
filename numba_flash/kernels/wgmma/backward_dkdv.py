"""Gradients of keys and values for Hopper (sm_90a): TMA brings tiles, wgmma multiplies them, both run on their own.

Read wgmma_forward and mma_backward_dkdv first. A block owns a tile of keys of one KV head and walks over the tiles of
queries that see it, of each query head of the group in turn, so that dK and dV are sums in registers: no atomics, and
the same bits in every run. Scores are computed transposed,

    S^T = K Q^T     P^T = 2^(scale_log2 S^T - lse_log2)     dP^T = V dO^T     dS^T = P^T * (dP^T - delta)

because what a lane then holds of P^T and dS^T is, rounded to 16 bits, what it must hold as the first operand of

    dV += P^T dO     dK += dS^T Q     and at the end dK *= scale

so neither leaves the registers. Q and dO are read from shared memory twice, once as rows and once as columns.

Roles. The producer, one thread, fetches K and V once and then Q, dO, lse and delta, tile after tile. Each consumer
warpgroup owns 64 keys. Consumers meet nowhere but at the producer's mbarriers, so while one computes exponentials the
others multiply. S of the next tile is issued behind dV and dK of this one, so a warpgroup's products follow each other.

That P is recomputed from lse and that delta = rowsum(dO * O) carries the softmax's derivative is FlashAttention's (Dao
et al., 2022, section 3 and appendix B); the roles are FlashAttention-3's (Shah et al., 2024).

Launch: grid (batch * heads_kv * key tiles), block (config.threads), config.shared_bytes of dynamic shared memory;
tensor maps of q, k, v and do. dk and dv are contiguous.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ...ptx import bar, cvt, fence, ld_st, mbarrier, memory, setmaxnreg, shared, shfl, special, tma, wgmma
from ..score import fragments, positions
from ..steps import gradient_rows, row_facts
from ..steps import recompute_keys as recompute
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.integers import divide
from ..steps.plain import key_queries, key_tiles
from ..steps.tiles import row_base
from . import backward_producer, backward_state
from .backward_producer import DO_MAP, K_MAP, Q_MAP, V_MAP
from .backward_state import BATCH, BEGIN, CUT, FIRST_ROW, FREE, GROUP, HEAD_KV, KEYS, STOP


def make(config):
    tile_m, tile_n = config.tile_m, config.tile_n
    depth, width, head_dim, head_dim_v = config.depth, config.width, config.head_dim, config.head_dim_v
    of_dk, of_dv, alignment = config.of_dk, config.of_dv, config.ALIGNMENT
    plan, at = config.shared_plan(), config.barriers()
    dv_at = plan.own_b if of_dk else plan.own_a  # where dV is staged
    facts_bytes = config.row_facts_bytes
    s_count, frag_count, blocks = tile_m // 2, tile_m // 4, tile_m // 8
    dk_count, dv_count = depth // 2 if of_dk else 1, width // 2 if of_dv else 1
    varies = config.derivative_varies

    # 16 columns of a tile in panels are 32 bytes of a panel's row, 64 a panel; offsets are in units of 16 bytes.
    kind = "f16" if config.dtype == "float16" else "bf16"
    own_panel, stream_panel = tile_n * 128, tile_m * 128
    own_steps = tuple(((x % 4) * 32 + (x // 4) * own_panel) >> 4 for x in range(max(depth, width) // 16))
    stream_steps = tuple(((x % 4) * 32 + (x // 4) * stream_panel) >> 4 for x in range(max(depth, width) // 16))
    row_steps = tuple((y * 16 * 128) >> 4 for y in range(tile_m // 16))
    a_bytes, b_bytes = config.stream_a_bytes, config.stream_b_bytes
    multiply_k_q = wgmma.product_shared(tile_m, kind, own_steps[: depth // 16], stream_steps[: depth // 16], 0)
    multiply_v_do = wgmma.product_shared(tile_m, kind, own_steps[: width // 16], stream_steps[: width // 16], 0)
    multiply_ds_q = wgmma.product_registers(depth, kind, row_steps, 1)
    multiply_p_do = wgmma.product_registers(width, kind, row_steps, 1)
    describe_rows = wgmma.descriptor(16, 1024, 128)  # the first number is not used
    describe_columns = wgmma.descriptor(stream_panel, 1024, 128)
    commit, wait_all, wait_but_one = wgmma.commit_group, wgmma.wait_group(0), wgmma.wait_group(1)
    wait_but_two = wgmma.wait_group(2)
    pin_s, pin_dk, pin_dv = wgmma.pin(s_count), wgmma.pin(dk_count), wgmma.pin(dv_count)

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    give_registers = setmaxnreg.decrease(config.registers[0])
    take_registers = setmaxnreg.increase(config.registers[1])
    wait, arrive_if = mbarrier.wait, mbarrier.arrive_if
    load_v4, load_b32, load_bytes = ld_st.load_v4, ld_st.load_b32, tma.load_bytes
    fence_init, fence_async = fence.mbarrier_init, fence.proxy_async
    bar_sync, warp_sync, idx_b32 = bar.sync, bar.warp_sync, shfl.idx_b32
    thread_index, block_index = special.thread_index, special.block_index
    address, shared_address = memory.address, shared.address
    pieces, piece = row_facts.pieces, row_facts.PIECE

    set_up, put, put_position, word, position = backward_state.make(config)
    a_stage_of, a_phase_of = backward_state.ring(config.stages_a)
    b_stage_of, b_phase_of = backward_state.ring(config.stages_b)
    own_maps = (K_MAP, V_MAP if of_dk else None)
    load_own, load_a, load_b = backward_producer.make(config, own_maps, (Q_MAP, DO_MAP))
    keys_and_start = positions.make(config)
    mask_words, visible, _, _ = fragments.tile(config, 1, tile_m)  # its columns are queries
    chain, (weight, _) = fragments.chain(config), fragments.weights(config)
    row_term, has_row_term = chain.row_term, chain.has_row_term
    stage_dk, store_dk = gradient_rows.make(config.dtype, tile_n, 16, head_dim, head_dim % 8 == 0)
    stage_dv, store_dv = gradient_rows.make(config.dtype, tile_n, 16, head_dim_v, head_dim_v % 8 == 0)
    recompute_keys = recompute.make(config)

    @inlined
    def work_of(block, heads_kv, seqlen_k):
        """-> (b, h_kv, first_key). The first keys of a head come first: under a causal mask most queries see them."""
        n_tiles = divide(int32(seqlen_k) + int32(tile_n - 1), tile_n)
        head_of_all = divide(block, n_tiles)
        b = divide(head_of_all, heads_kv)
        return b, int32(head_of_all - b * heads_kv), int32((block - head_of_all * n_tiles) * tile_n)

    @inlined
    def note_work(base, arrays, strides, sizes):
        """What the block is to do, for all of its roles; by one thread."""
        seqlen_q, left, right = sizes.seqlen_q, sizes.left, sizes.right
        b, h_kv, first_key = work_of(block_index(), sizes.heads_kv, sizes.seqlen_k)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)
        keys_left = min(keys - first_key, tile_n)
        top_first, top_end = key_queries(first_key, q_start, left, right, seqlen_q)
        bottom_first, bottom_end = key_queries(first_key + keys_left - 1, q_start, left, right, seqlen_q)
        begin, free, cut, stop = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
        put(base, BATCH, b)
        put(base, HEAD_KV, h_kv)
        put(base, FIRST_ROW, first_key)
        put(base, KEYS, keys)
        put(base, BEGIN, begin)
        put(base, FREE, free)
        put(base, CUT, cut)
        put(base, STOP, stop if keys_left > 0 else begin)
        put(base, GROUP, divide(sizes.heads, sizes.heads_kv))
        put_position(base, first_key - q_start)  # among the queries

    @inlined
    def of_word(base, which):
        """A word of the block's state, for one thread. It reads it anew rather than keep it: it has few registers."""
        return int32(load_b32(int32(base + plan.state + which)))

    @inlined
    def produce_a(base, facts, heads, seqlen_q):
        """One thread: K and V, then Q with its lse and -delta, tile after tile of head after head. Behind the last
        comes a Q past the end, zeros: its S is issued and dropped, so that consumers need no branch."""
        load_own(base, of_word(base, FIRST_ROW), of_word(base, HEAD_KV), of_word(base, BATCH))
        tile_pieces = tile_m // 16
        n, member, i = int32(0), int32(0), of_word(base, BEGIN)
        while member < of_word(base, GROUP) and i < of_word(base, STOP):
            h = int32(of_word(base, HEAD_KV) * of_word(base, GROUP) + member)
            # past the last piece masks see to what is there
            count = int32(min(int32(pieces(seqlen_q) - i * tile_pieces), int32(tile_pieces)) * int32(4 * piece))
            stage = load_a(base, n, int32(i * tile_m), h, of_word(base, BATCH), count)
            first_piece = int64(of_word(base, BATCH) * heads + h) * pieces(seqlen_q) + i * tile_pieces
            load_bytes(
                base + plan.row_facts + stage * facts_bytes, address(facts, first_piece * piece),
                base + at.a_full + 8 * stage, count,
            )  # fmt: skip
            n, i = int32(n + 1), int32(i + 1)
            if i == of_word(base, STOP):
                i, member = of_word(base, BEGIN), int32(member + 1)
        load_a(base, n, int32((divide(int32(seqlen_q), tile_m) + 1) * tile_m), 0, 0, 0)

    @inlined
    def produce_b(base):
        """Another thread, of another warp, so that neither waits for the other: dO."""
        n, member, i = int32(0), int32(0), of_word(base, BEGIN)
        while member < of_word(base, GROUP) and i < of_word(base, STOP):
            h = int32(of_word(base, HEAD_KV) * of_word(base, GROUP) + member)
            load_b(base, n, int32(i * tile_m), h, of_word(base, BATCH))
            n, i = int32(n + 1), int32(i + 1)
            if i == of_word(base, STOP):
                i, member = of_word(base, BEGIN), int32(member + 1)

    @inlined
    def issue_s(base, acc_s, k_desc, n):
        """S^T of the n-th query tile, once it has come."""
        stage = a_stage_of(n)
        wait(base + at.a_full + 8 * stage, a_phase_of(n))
        multiply_k_q(acc_s, k_desc, describe_rows(base + plan.stream_a + stage * a_bytes), 0)
        commit()

    @inlined
    def issue_dp(base, acc_dp, v_desc, n):
        """dP^T of the n-th query tile; its dO has come."""
        stage = b_stage_of(n)
        multiply_v_do(acc_dp, v_desc, describe_rows(base + plan.stream_b + stage * b_bytes), 0)
        commit()

    @inlined
    def issue_dv(base, acc_dv, p_frag, n):
        """dV += P^T dO of the n-th query tile."""
        stage = b_stage_of(n)
        multiply_p_do(acc_dv, p_frag, describe_columns(base + plan.stream_b + stage * b_bytes), 1)
        commit()

    @inlined
    def issue_dk(base, acc_dk, ds_frag, n):
        """dK += dS^T Q of the n-th query tile."""
        stage = a_stage_of(n)
        multiply_ds_q(acc_dk, ds_frag, describe_columns(base + plan.stream_a + stage * a_bytes), 1)
        commit()

    @inlined
    def release_q(base, n, elected):
        """A warp is done with the n-th Q, lse and delta."""
        fence_async()  # lse and delta were read by ordinary loads, and the next ones come by a copy
        warp_sync()  # in all lanes
        arrive_if(base + at.a_empty + 8 * a_stage_of(n), elected)

    @inlined
    def release_do(base, n, elected):
        """A warp is done with the n-th dO."""
        arrive_if(base + at.b_empty + 8 * b_stage_of(n), elected)

    @inlined
    def rows_of_lane():
        """-> (the warp's first row in the key tile, lane), worked out anew: registers are dear."""
        thread = thread_index() - 128
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def is_seen(mask_bits, r, n, x):
        return (mask_bits[r * (mask_words // 2) + n // 16] >> uint32(2 * (n % 16) + x)) & uint32(1) != 0

    @inlined
    def to_weights(acc_s, p_frag, facts, mask_bits, term, distance, score, masked):
        """acc_s <- P^T, p_frag <- the same in 16 bits. Where the derivative varies acc_s stays: it is needed again."""
        four = cuda.local.array(4, uint32)
        p = cuda.local.array(2, float32)
        place = facts + ((thread_index() & int32(3)) << 4)
        for pair in range(blocks // 2):
            load_v4(four, 0, place + pair * 128)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        lse_log2 = four[half * 2 + x].view(np.float32)
                        away = distance[r] - float32(n * 8 + x)
                        p[x], _ = weight(acc_s[i], term, away, score, lse_log2)
                        if masked and not is_seen(mask_bits, r, n, x):
                            p[x] = float32(0)
                        if not varies:
                            acc_s[i] = p[x]
                    if of_dv:
                        p_frag[2 * n + r] = pack(p[0], p[1])

    @inlined
    def to_score_gradients(acc_s, acc_dp, ds_frag, facts, mask_bits, term, distance, score, masked):
        """ds_frag <- dS^T in 16 bits."""
        four = cuda.local.array(4, uint32)
        ds = cuda.local.array(2, float32)
        place = facts + ((thread_index() & int32(3)) << 4)
        for pair in range(blocks // 2):
            if varies:
                lse = cuda.local.array(4, uint32)
                load_v4(lse, 0, place + pair * 128)
            load_v4(four, 0, place + pair * 128 + 64)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        minus_delta = four[half * 2 + x].view(np.float32)
                        if varies:
                            away = distance[r] - float32(n * 8 + x)
                            lse_log2 = lse[half * 2 + x].view(np.float32)
                            p, derivative = weight(acc_s[i], term, away, score, lse_log2)
                            ds[x] = p * (acc_dp[i] + minus_delta) * derivative
                        else:
                            ds[x] = acc_s[i] * (acc_dp[i] + minus_delta)
                        if masked and not is_seen(mask_bits, r, n, x):
                            ds[x] = float32(0)  # dP may be NaN there
                    ds_frag[2 * n + r] = pack(ds[0], ds[1])

    @inlined
    def look(base, i, sizes, mask_bits, distance):
        """mask_bits <- which of the lane's scores of query tile i count; distance: q_pos - k_pos."""
        first_row, lane = rows_of_lane()
        # seen from the keys, left and right change places
        left, right, seqlen_q = sizes.right, sizes.left, sizes.seqlen_q
        visible(i, first_row, lane, position(base), left, right, seqlen_q, mask_bits, distance)

    @inlined
    def term_of(base, member, arrays, strides):
        """What the scores of the head share (kernels/score/fragments.py)."""
        head = word(base, HEAD_KV) * word(base, GROUP) + member
        return row_term(word(base, BATCH), head, arrays, strides)

    @inlined
    def consume(base, warpgroup, arrays, strides, sizes, score):
        """A consumer warpgroup: 64 of the block's keys."""
        acc_s = cuda.local.array(s_count, float32)  # (tile_m / 8, 4)
        acc_dp = cuda.local.array(s_count, float32)  # (tile_m / 8, 4)
        acc_dk = cuda.local.array(dk_count, float32)  # (depth / 8, 4)
        acc_dv = cuda.local.array(dv_count, float32)  # (width / 8, 4)
        p_frag = cuda.local.array(frag_count, uint32)  # (tile_m / 8, 2)
        ds_frag = cuda.local.array(frag_count, uint32)  # (tile_m / 8, 2)
        mask_bits = cuda.local.array(mask_words, uint32)
        distance = cuda.local.array(2, float32)
        me = int32(warpgroup - 1)  # which of the consumers
        elected = thread_index() & int32(31) == 0
        k_desc = describe_rows(base + plan.own_a + me * (64 * 128))
        v_desc = describe_rows(base + plan.own_b + me * (64 * 128))
        for x in range(s_count):
            acc_s[x] = float32(0)
            acc_dp[x] = float32(0)
        for x in range(dk_count):
            acc_dk[x] = float32(0)
        for x in range(dv_count):
            acc_dv[x] = float32(0)
        for x in range(mask_words):
            mask_bits[x] = uint32(0)
        for r in range(2):
            distance[r] = float32(0)
        term = float32(0)

        i, stop = word(base, BEGIN), word(base, STOP)
        steps = int32(word(base, GROUP) * (stop - i))
        member = int32(0)
        n = int32(0)
        wait(base + at.own_full, 0)
        # Else ptxas makes these zeros out of the accumulators of S, which are theirs too, while S is being computed.
        pin_s(acc_s)
        pin_s(acc_dp)
        pin_dk(acc_dk)
        pin_dv(acc_dv)
        issue_s(base, acc_s, k_desc, n)
        while n < steps:
            stage_b = b_stage_of(n)
            wait(base + at.b_full + 8 * stage_b, b_phase_of(n))
            masked = i >= word(base, CUT) or i < word(base, FREE)
            facts = base + plan.row_facts + a_stage_of(n) * facts_bytes
            if has_row_term:
                term = term_of(base, member, arrays, strides)
            if has_row_term or masked:
                look(base, i, sizes, mask_bits, distance)
            wait_all()
            pin_s(acc_s)
            if of_dk:
                issue_dp(base, acc_dp, v_desc, n)
            if masked:
                to_weights(acc_s, p_frag, facts, mask_bits, term, distance, score, TRUE)
            else:
                to_weights(acc_s, p_frag, facts, mask_bits, term, distance, score, FALSE)
            if of_dk:
                wait_all()
                pin_s(acc_dp)
                if masked:
                    to_score_gradients(acc_s, acc_dp, ds_frag, facts, mask_bits, term, distance, score, TRUE)
                else:
                    to_score_gradients(acc_s, acc_dp, ds_frag, facts, mask_bits, term, distance, score, FALSE)
            if of_dv:
                issue_dv(base, acc_dv, p_frag, n)
            if of_dk:
                issue_dk(base, acc_dk, ds_frag, n)
            issue_s(base, acc_s, k_desc, int32(n + 1))
            if of_dv and of_dk:
                wait_but_two()
                release_do(base, n, elected)
            wait_but_one()
            if of_dv:
                pin_dv(acc_dv)
            if of_dk:
                pin_dk(acc_dk)
            if not (of_dv and of_dk):
                release_do(base, n, elected)
            release_q(base, n, elected)
            n = int32(n + 1)
            i = int32(i + 1)
            if i == stop:
                i, member = word(base, BEGIN), int32(member + 1)
        wait_all()

        # dK and dV to the place of the warpgroup's own rows of K and V, and from there to global memory.
        bar_sync(me + 1, 128)  # all four warps have read these rows for the last time
        first_row, lane = rows_of_lane()
        b, h_kv, first_key, keys = word(base, BATCH), word(base, HEAD_KV), word(base, FIRST_ROW), word(base, KEYS)
        keys_left = int32(min(keys - first_key, tile_n))
        rows_left = int32(min(sizes.seqlen_k - first_key, tile_n))
        nonfinite = uint32(0)
        if of_dk:
            nonfinite |= stage_dk(acc_dk, score.scale, base + plan.own_a, first_row, lane, keys_left)
        if of_dv:
            nonfinite |= stage_dv(acc_dv, float32(1), base + dv_at, first_row, lane, keys_left)
        if of_dk:
            to, row = row_base(strides.dk, b, h_kv, first_key), strides.dk[2]
            store_dk(base + plan.own_a, first_row, lane, arrays.dk, to, row, rows_left, head_dim, nonfinite)
        if of_dv:
            to, row = row_base(strides.dv, b, h_kv, first_key), strides.dv[2]
            store_dv(base + dv_at, first_row, lane, arrays.dv, to, row, rows_left, head_dim_v, nonfinite)
        if nonfinite != 0:
            q_start = first_key - position(base)
            recompute_keys(nonfinite, first_row, lane, b, h_kv, first_key, q_start, arrays, strides, sizes, score)

    @cuda.jit
    def flash_attention_wgmma_dkdv(tensor_maps, arrays, strides, sizes, score):
        smem = cuda.shared.array(0, uint8)
        base = int32((shared_address(smem) + int32(alignment - 1)) & int32(-alignment))
        thread = thread_index()
        warpgroup = int32(idx_b32(uint32(thread >> int32(7)), 0))  # known to be the same in a whole warp
        if thread == 0:
            set_up(base)
            fence_init()
            note_work(base, arrays, strides, sizes)
        cuda.syncthreads()
        if warpgroup == 0:
            give_registers()
            if thread == 0:
                produce_a(base, arrays.row_facts, sizes.heads, sizes.seqlen_q)
            if thread == 32:
                produce_b(base)
        else:
            take_registers()
            consume(base, warpgroup, arrays, strides, sizes, score)

    return flash_attention_wgmma_dkdv
