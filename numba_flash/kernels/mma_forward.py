"""FlashAttention-2 on tensor cores: v2 with mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read v2 first: the order is the same, Q outside, K and V inside, one division at the end. What changes is
who computes. A warp owns `warp_rows` query rows and computes S (warp_rows x tile_n) and O with 16 x 8 x 16
products; what a lane holds of S is, rounded to 16 bits, what it must hold of P for P . V
(ptx/fragments.py), so P never leaves the registers. K and V come by cp.async while the products
of the other one run: V of a tile during S, K of the next tile during softmax and P . V.

Letters as in v2; p_frag, k_frag, v_frag are operands in registers, acc_s and acc_o float32 accumulators.
Keys are walked from the last tile to the first, so that the tiles that need a mask come first under a
causal mask. The order is Dao's (FlashAttention-2, 2023).

Launch: grid (batch * heads / group * query tiles * v_parts), block (config.threads), config.shared_bytes of
dynamic shared memory. Rows of q, k and v begin at multiples of 16 bytes and are contiguous along dim.
"""

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from ..ptx import cp_async, cvt, ld_st, ldmatrix, memory, mma, shared, shfl, special, vote
from .steps import async_tiles, elements, fragment_scores, fragment_softmax, notes, output_rows, scores
from .steps import repair_rows as repair_rows_step
from .steps.inlined import FALSE, TRUE, inlined
from .steps.integers import divide
from .steps.plain import chunk_pair, first_column_of, first_row_of, key_tiles, panel_offset, row_keys


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    depth, width, v_parts = config.depth, config.width, config.v_parts
    _, k_at, v_at, notes_at, tile_notes_at, _ = config.shared_offsets()
    bases_at, keys_at = tile_notes_at, tile_notes_at + notes.SIZE
    alignment, note_bytes = config.ALIGNMENT, config.NOTE_BYTES
    many_copies = max(depth, width) > 128
    q_panel, kv_panel = tile_m * 128, tile_n * 128  # bytes
    group, queries = config.group, config.queries
    strips, rows = warp_rows // 16, warp_rows // 8  # of 16 rows a warp; rows that a lane has a part of
    s_blocks, o_blocks = tile_n // 8, width // 8
    s_count, o_count, p_count = strips * s_blocks * 4, strips * o_blocks * 4, strips * s_blocks * 2
    # Steps of 16 of head_dim that are written out behind each other: all of them up to 128 and where Q stays in
    # registers, else some at a time, because the 16 steps of head_dim 256 spill registers. Q's fragments have a slot
    # for each, in name also where they share registers: that makes the compiler unroll the loop over them.
    steps = depth // 16
    at_once = steps if config.q_registers or steps <= 8 else max(n for n in range(1, 9) if steps % n == 0)
    q_count = strips * at_once * 4
    q_registers, scaled, has_alibi = config.q_registers, config.scaled, config.alibi_dtype is not None

    half = config.dtype == "float16"
    product = mma.m16n8k16_f16 if half else mma.m16n8k16_bf16
    pack = cvt.pack_f16x2 if half else cvt.pack_bf16x2
    load_q = async_tiles.loader(tile_m, depth, threads, group)
    load_k = async_tiles.loader(tile_n, depth, threads)
    load_v = async_tiles.loader(tile_n, width, threads)
    head, _ = scores.make(config)
    seen_count, one_score, visible, finish_scores, mask_scores = fragment_scores.make(config, strips)
    start, softmax, to_p, finish = fragment_softmax.make(config, strips)
    store_rows = output_rows.make(config, warp_rows, width)
    repair_rows = repair_rows_step.make(config, warp_rows, one_score)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    x4, x4_trans = ldmatrix.x4, ldmatrix.x4_trans
    commit, wait_all = cp_async.commit_group, cp_async.wait_group(0)
    bfly, any_lane = shfl.bfly_f32, vote.any_lane
    write_lse, ln_2 = config.write_lse, float32(fragment_softmax.LN_2)
    thread_index, block_index = special.thread_index, special.block_index
    store_shared = ld_st.store_b32
    address, shared_address = memory.address, shared.address
    log2_e = float32(fragment_scores.LOG2_E)

    @inlined
    def aligned(address):
        return int32((address + int32(alignment - 1)) & int32(-alignment))

    @inlined
    def multiply_q_k(acc_s, q_frag, k_frag, q_lane, k_lane):
        """acc_s (strips, tile_n / 8, 4) = Q . K^T. q_lane, k_lane: where this lane's matrix rows begin."""
        for i in range(s_count):
            acc_s[i] = float32(0)
        for first in range(0, steps, at_once):
            for x in range(at_once):
                if not q_registers:
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        x4(q_frag, a, chunk_pair(q_lane, first + x, q_panel) + strip * 2048)  # (16, 16)
                for n in range(tile_n // 16):
                    x4(k_frag, 0, chunk_pair(k_lane, first + x, kv_panel) + n * 2048)  # (16 keys, 16)
                    for strip in range(strips):
                        a = (strip * at_once + x) * 4
                        product(acc_s, (strip * s_blocks + 2 * n) * 4, q_frag, a, k_frag, 0)
                        product(acc_s, (strip * s_blocks + 2 * n + 1) * 4, q_frag, a, k_frag, 2)

    @inlined
    def multiply_p_v(acc_o, p_frag, v_frag, v_lane):
        """acc_o (strips, width / 8, 4) += P . V."""
        for y in range(tile_n // 16):
            for n in range(width // 16):
                x4_trans(v_frag, 0, chunk_pair(v_lane, n, kv_panel) + y * 2048)  # (16 keys, 16)
                for strip in range(strips):
                    a = (strip * s_blocks + 2 * y) * 2
                    product(acc_o, (strip * o_blocks + 2 * n) * 4, p_frag, a, v_frag, 0)
                    product(acc_o, (strip * o_blocks + 2 * n + 1) * 4, p_frag, a, v_frag, 2)

    @inlined
    def rescale(acc_o, alpha, moved):
        if moved != 0:
            for strip in range(strips):
                for n in range(o_blocks):
                    for i in range(4):
                        acc_o[(strip * o_blocks + n) * 4 + i] *= alpha[strip * 2 + i // 2]

    @inlined
    def again(thread):
        """The thread's number; read anew where its many copies have addresses that would be kept through the loop."""
        return thread_index() if many_copies else thread

    @inlined
    def scores_of_tile(j, acc_s, q_frag, kv_frag, q_smem, lanes, v_bytes, columns_left, thread, masked):
        """S of tile j while its V is on the way."""
        _, v_global = notes.get(q_smem + int32(bases_at))
        rows_left = int32(tile_n)
        if masked:
            _, keys = notes.get(q_smem + int32(keys_at))
            rows_left = int32(int32(keys) - j * tile_n)
        source = v_global + j * tile_n * v_bytes
        wait_all()
        cuda.syncthreads()  # K_j is there, and everyone is done with V_j+1
        load_v(q_smem + int32(v_at), source, v_bytes, 0, rows_left, columns_left, again(thread))
        commit()
        multiply_q_k(acc_s, q_frag, kv_frag, lanes[0], lanes[1])

    @inlined
    def outputs_of_tile(
        j, begin, acc_s, acc_o, p_frag, kv_frag, m, l, alpha, q_smem, lanes, k_bytes, thread, scale_log2
    ):  # fmt: skip
        """softmax and O of tile j while the next tile's K is on the way."""
        k_global, _ = notes.get(q_smem + int32(bases_at))
        source = k_global + (j - 1) * tile_n * k_bytes
        wait_all()
        cuda.syncthreads()  # V_j is there, and everyone is done with K_j
        if j > begin:
            load_k(q_smem + int32(k_at), source, k_bytes, 0, int32(tile_n), int32(head_dim), again(thread))
            commit()
        moved = softmax(acc_s, m, l, alpha, scale_log2)
        to_p(acc_s, p_frag)
        rescale(acc_o, alpha, moved)
        multiply_p_v(acc_o, p_frag, kv_frag, lanes[2])

    @inlined
    def tile_of(block, heads, heads_kv, seqlen_q, seqlen_k, seqlens_k, q_offsets, batch_strides, q_offset):
        """-> (b, h, h_kv, first_query, part, keys, tile_pos): what a block works on.

        The last queries of a head come first: under a causal mask they see the most keys.
        """
        m_tiles = divide(int32(seqlen_q) + int32(queries - 1), queries)
        tiles = divide(block, v_parts)
        part = int32(block - tiles * v_parts)
        head_tiles = divide(tiles, m_tiles)
        first_query = int32((m_tiles - 1 - (tiles - head_tiles * m_tiles)) * queries)
        groups = divide(heads, group)
        b = divide(head_tiles, groups)
        h = int32((head_tiles - b * groups) * group)
        h_kv = divide(h, divide(heads, heads_kv))
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        return b, h, h_kv, first_query, part, int32(keys), first_query + q_start

    @cuda.jit
    def flash_attention_mma(
        q, k, v, o, lse, bias, mask, alibi_slopes, seqlens_k, q_offsets,
        q_strides, k_strides, v_strides, o_strides, bias_strides, mask_strides, alibi_strides, batch_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale_, softcap_,
    ):  # fmt: skip
        scale, softcap = float32(scale_), float32(softcap_)
        scale_log2 = scale * log2_e
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        b, h, h_kv, first_query, part, keys, tile_pos = tile_of(
            block_index(), heads, heads_kv, seqlen_q, seqlen_k, seqlens_k, q_offsets, batch_strides, q_offset
        )
        queries_left = int32(min(seqlen_q - first_query, queries))
        columns_left = int32(head_dim_v - part * width)

        smem = cuda.shared.array(0, uint8)
        q_smem = aligned(shared_address(smem))  # (tile_m, depth)
        k_smem = q_smem + int32(k_at)  # (tile_n, depth)
        v_smem = q_smem + int32(v_at)  # (tile_n, width)
        q_base = b * q_strides[0] + h * q_strides[1] + first_query * q_strides[2]
        k_base = b * k_strides[0] + h_kv * k_strides[1]
        v_base = b * v_strides[0] + h_kv * v_strides[1] + part * width
        q_global, k_global, v_global = address(q, q_base), address(k, k_base), address(v, v_base)
        q_bytes, head_bytes, k_bytes, v_bytes = 2 * q_strides[2], 2 * q_strides[1], 2 * k_strides[2], 2 * v_strides[2]

        # Rows of this lane's matrices: for Q and V lanes 8 to 15 stand 8 rows below, for K lanes 16 to 31 do.
        q_lane = q_smem + panel_offset(warp * warp_rows + (lane & 15), lane >> 4, tile_m)
        k_lane = k_smem + panel_offset((lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1, tile_n)
        v_lane = v_smem + panel_offset(lane & 15, lane >> 4, tile_n)

        acc_s = cuda.local.array(s_count, float32)  # (strips, tile_n / 8, 4)
        acc_o = cuda.local.array(o_count, float32)  # (strips, width / 8, 4)
        p_frag = cuda.local.array(p_count, uint32)  # (strips, tile_n / 8, 2)
        q_frag = cuda.local.array(q_count, uint32)
        kv_frag = cuda.local.array(4, uint32)  # (16, 16) of K or V
        m = cuda.local.array(rows, float32)
        l = cuda.local.array(rows, float32)
        alpha = cuda.local.array(rows, float32)
        slopes = cuda.local.array(rows, float32)
        distance = cuda.local.array(rows, float32)
        seen = cuda.local.array(seen_count, uint32)  # bits of a masked tile
        row_query = cuda.local.array(rows, int32)  # the query of each of the lane's rows, in the tile
        start(m, l)
        for i in range(o_count):
            acc_o[i] = float32(0)
        lane_row = warp * warp_rows + int32(first_row_of(lane))
        lane_column = int32(first_column_of(lane))
        for r in range(rows):
            row = uint32(lane_row + r * 8)
            row_query[r] = int32(row // uint32(group))
            slopes[r] = float32(0)
            if has_alibi:
                row_head = min(h + int64(row % uint32(group)), heads - 1)
                slopes[r] = load_slope(alibi_slopes, b * alibi_strides[0] + row_head * alibi_strides[1])

        top_first, top_end = row_keys(tile_pos, left, right, keys)
        bottom_first, bottom_end = row_keys(tile_pos + queries_left - 1, left, right, keys)
        begin_, free_, cut_, stop = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        begin, free, cut = int32(begin_), int32(free_), int32(cut_)

        if thread == 0:
            notes.put(q_smem + int32(bases_at), k_global, v_global)
            notes.put(q_smem + int32(keys_at), tile_pos, int64(keys))
        cuda.syncthreads()
        j = int32(stop - 1)
        load_q(q_smem, q_global, q_bytes, head_bytes, queries_left, head_dim, thread)
        if j >= begin:
            first_key = j * tile_n
            load_k(k_smem, k_global + first_key * k_bytes, k_bytes, 0, int32(keys - first_key), int32(head_dim), thread)
        commit()
        if q_registers:
            wait_all()
            cuda.syncthreads()
            for strip in range(strips):
                for x in range(steps):
                    a = (strip * at_once + x) * 4
                    x4(q_frag, a, chunk_pair(q_lane, x, q_panel) + strip * 2048)

        lanes = (q_lane, k_lane, v_lane)
        while j >= begin:
            # Tiles that some row sees in part; then those that every row sees whole; then, behind a left window,
            # some of the first kind again.
            while j >= begin and (j >= cut or j < free):
                scores_of_tile(j, acc_s, q_frag, kv_frag, q_smem, lanes, v_bytes, columns_left, thread, TRUE)
                # With the thread's number read anew, this is not worked out ahead of the loop and kept in registers.
                now = thread_index()
                its_pos, its_keys = notes.get(q_smem + int32(keys_at))
                visible(
                    j, (now >> int32(5)) * warp_rows, now & int32(31), its_pos, left, right, int32(its_keys),
                    seen, distance,
                )  # fmt: skip
                if scaled:
                    finish_scores(acc_s, slopes, distance, scale, softcap)
                mask_scores(acc_s, seen)
                outputs_of_tile(
                    j, begin, acc_s, acc_o, p_frag, kv_frag, m, l, alpha, q_smem, lanes, k_bytes, thread, scale_log2
                )  # fmt: skip
                j = int32(j - 1)
            while j >= free and j < cut:
                scores_of_tile(j, acc_s, q_frag, kv_frag, q_smem, lanes, v_bytes, columns_left, thread, FALSE)
                if scaled:
                    its_pos, _ = notes.get(q_smem + int32(keys_at))
                    for r in range(rows):
                        distance[r] = float32(its_pos + row_query[r] - j * tile_n - lane_column)
                    finish_scores(acc_s, slopes, distance, scale, softcap)
                outputs_of_tile(
                    j, begin, acc_s, acc_o, p_frag, kv_frag, m, l, alpha, q_smem, lanes, k_bytes, thread, scale_log2
                )  # fmt: skip
                j = int32(j - 1)

        # Where all this belongs is worked out again: kept through the loop, it would cost the registers that S needs.
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        lane_row = warp * warp_rows + int32(first_row_of(lane))
        lane_column = int32(first_column_of(lane))
        b, h, h_kv, first_query, part, keys, tile_pos = tile_of(
            block_index(), heads, heads_kv, seqlen_q, seqlen_k, seqlens_k, q_offsets, batch_strides, q_offset
        )
        lse_log2 = distance
        finish(m, l, alpha, lse_log2)
        wait_all()
        cuda.syncthreads()  # everyone is done with Q and K
        # One division, then O in 16 bits to shared memory, with a note on each row.
        o_smem = aligned(shared_address(smem))  # (tile_m, width)
        row_notes = o_smem + notes_at
        any_suspect = uint32(0)
        for r in range(rows):
            strip, below = r // 2, r % 2
            row = lane_row + r * 8
            suspect = float32(0)
            for n in range(o_blocks):
                at = (strip * o_blocks + n) * 4 + below * 2
                low, high = acc_o[at] * alpha[r], acc_o[at + 1] * alpha[r]
                suspect += low * float32(0) + high * float32(0)  # NaN when one of them is NaN or Inf
                store_shared(o_smem + panel_offset(row, n, tile_m) + 2 * lane_column, pack(low, high))
            suspect += bfly(suspect, 1)
            suspect += bfly(suspect, 2)
            flag = uint32(0) if suspect == 0 else uint32(1)
            any_suspect |= flag
            if lane & 3 == 0:
                store_shared(row_notes + row * note_bytes, flag)
                store_shared(row_notes + row * note_bytes + 4, lse_log2[r].view(np.uint32))
                query = first_query + row // group
                if write_lse and part == 0 and query < seqlen_q:
                    lse[(b * heads + h + row % group) * seqlen_q + query] = lse_log2[r] * ln_2
        cuda.syncthreads()
        store_rows(warp * warp_rows, lane, o_smem, row_notes, o, o_strides, b, h, first_query, seqlen_q, part)
        if any_lane(any_suspect) != 0:
            repair_rows(
                warp * warp_rows, lane, row_notes, (q, k, v, o), (q_strides, k_strides, v_strides, o_strides),
                b, h, h_kv, first_query, seqlen_q, part, tile_pos, left, right, keys,
                alibi_slopes, alibi_strides, scale, softcap,
            )  # fmt: skip

    return flash_attention_mma
