"""Gradients of queries on tensor cores: mma.sync, ldmatrix and cp.async, for every GPU since Ampere (sm_80).

Read mma_forward and mma_backward_dkdv first. A block owns a tile of queries of one head and walks over the tiles of
keys that they see, like the forward, but without an online softmax: lse is known. A warp owns `warp_rows` queries,

    S = Q K^T     P = 2^(scale_log2 S - lse_log2)     dP = dO V^T     dS = P * (dP - delta)     dQ += dS K

and at the end dQ *= scale. What a lane holds of dS is, rounded to 16 bits, what it must hold as the first operand of
dS . K, so it never leaves the registers. Tiles of K and V come by cp.async while the products of the tile before run.

Letters as in v2; lse_log2 and minus_delta are those of the lane's rows.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory.
Rows of q, k, v and do begin at multiples of 16 bytes and are contiguous along dim; dq is contiguous.
"""

import math

from numba import cuda, float32, int32, int64, uint8, uint32

from .. import ranges
from ..ptx import cp_async, cvt, fragments, memory, shared, special
from .steps import async_tiles, elements, fragment_products, fragment_scores, gradient_rows, score_gradients, scores
from .steps import repair_queries as repair_queries_step
from .steps.integers import divide

row_keys = cuda.jit(device=True)(ranges.row_keys)
key_tiles = cuda.jit(device=True)(ranges.key_tiles)


def make(config):
    tile_m, tile_n, warp_rows, threads = config.tile_m, config.tile_n, config.warp_rows, config.threads
    head_dim, head_dim_v, depth, width = config.head_dim, config.head_dim_v, config.depth, config.width
    in_registers, alignment = config.in_registers, config.ALIGNMENT
    _, do_at, k_at, v_at, end_at = config.shared_offsets()
    k_stage, v_stage = (v_at - k_at) // 2, (end_at - v_at) // 2  # bytes
    strips, blocks, rows = warp_rows // 16, tile_n // 8, warp_rows // 8
    s_count, frag_count, dq_count = strips * blocks * 4, strips * blocks * 2, strips * depth // 2
    q_count, do_count = strips * depth // 4, strips * width // 4
    has_softcap, has_alibi = config.softcap, config.alibi_dtype is not None

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    load_q, load_do = async_tiles.loader(tile_m, depth, threads), async_tiles.loader(tile_m, width, threads)
    load_k, load_v = async_tiles.loader(tile_n, depth, threads), async_tiles.loader(tile_n, width, threads)
    head, _ = scores.make(config)
    one_score, limits, _, _ = fragment_scores.make(config, strips)
    weight, through_softcap = score_gradients.make(config, one_score)
    lanes_of, load_own, scores_product, gradient_product = fragment_products.make(config)
    load_q_frag, load_do_frag = load_own(depth), load_own(width)
    multiply_q_k, multiply_do_v = scores_product(depth), scores_product(width)
    multiply_ds_k = gradient_product(depth)
    stage_dq, store_dq = gradient_rows.make(config.dtype, tile_m, warp_rows, head_dim)
    repair_queries = repair_queries_step.make(config, weight, through_softcap)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    commit, wait_all = cp_async.commit_group, cp_async.wait_group(0)
    thread_index, block_index = special.thread_index, special.block_index
    address, shared_address = memory.address, shared.address
    first_row_of, first_column_of = cuda.jit(device=True)(fragments.row), cuda.jit(device=True)(fragments.column)
    log2_e, inf = float32(fragment_scores.LOG2_E), float32(math.inf)

    @cuda.jit(device=True, inline="always")
    def aligned(address):
        return (address + int32(alignment - 1)) & int32(-alignment)

    @cuda.jit(device=True, inline="always")
    def tile_of(block, heads, heads_kv, seqlen_q):
        """-> (b, h, h_kv, first_query). The last queries of a head come first: under a causal mask they see most."""
        m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
        head_tiles = divide(block, m_tiles)
        b = divide(head_tiles, heads)
        h = int32(head_tiles - b * heads)
        first_query = int32((m_tiles - 1 - (block - head_tiles * m_tiles)) * tile_m)
        return b, h, divide(h, divide(heads, heads_kv)), first_query

    @cuda.jit(device=True, inline="always")
    def load_tile(j, odd, k, v, k_strides, v_strides, b, h_kv, tiles, keys, thread):
        """Start the copies of K and V of key tile j to stage `odd`."""
        first_key = int64(j) * tile_n
        keys_left = int32(min(keys - first_key, tile_n))
        k_base = b * k_strides[0] + h_kv * k_strides[1] + first_key * k_strides[2]
        v_base = b * v_strides[0] + h_kv * v_strides[1] + first_key * v_strides[2]
        load_k(tiles[0] + odd * k_stage, address(k, k_base), 2 * k_strides[2], 0, keys_left, head_dim, thread)
        load_v(tiles[1] + odd * v_stage, address(v, v_base), 2 * v_strides[2], 0, keys_left, head_dim_v, thread)

    @cuda.jit(device=True, inline="always")
    def turn(j, odd, begin, k, v, k_strides, v_strides, tiles, keys, heads, heads_kv, seqlen_q):
        """Wait for the tile in stage `odd` and start the copies of the next one, tile j - 1."""
        wait_all()
        cuda.syncthreads()  # tile j is there, and everyone is done with the one before
        if j > begin:
            # Worked out again: kept through the loop, it would cost the registers that S needs.
            b, _, h_kv, _ = tile_of(block_index(), heads, heads_kv, seqlen_q)
            next_j, next_odd = int32(j - 1), int32(odd ^ 1)
            load_tile(next_j, next_odd, k, v, k_strides, v_strides, b, h_kv, tiles, keys, thread_index())
        commit()

    @cuda.jit(device=True, inline="always")
    def weigh(acc_s, acc_dp, ds_frag, lse_log2, slope, distance, first, end, scale, softcap, masked):
        """ds_frag <- dS in 16 bits. masked, a constant: some columns are not seen by some rows."""
        ds = cuda.local.array(2, float32)
        for r in range(rows):
            for n in range(blocks):
                block = (r // 2) * blocks + n
                at = block * 4 + (r % 2) * 2
                for i in range(2):
                    column = int32(n * 8 + i)
                    product = acc_s[at + i]
                    p = weight(product, slope, distance[r] - float32(column), scale, softcap, lse_log2[r])
                    ds[i] = p * acc_dp[at + i]
                    if has_softcap:
                        ds[i] *= through_softcap(product, scale, softcap)
                    if masked and (column < first[r] or column >= end[r]):
                        ds[i] = float32(0)
                ds_frag[block * 2 + r % 2] = pack(ds[0], ds[1])

    @cuda.jit(device=True, inline="always")
    def products_of_tile(
        odd, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, lse_log2, minus_delta, slope, distance, first, end,
        scale, softcap, masked,
    ):  # fmt: skip
        """dQ += what the key tile in stage `odd` gives."""
        q_frag, do_frag, ds_frag, b_frag = fragments_
        own_lane, other_lane, other_transposed = lanes
        k_tile, v_tile = tiles[0] + odd * k_stage, tiles[1] + odd * v_stage
        for x in range(s_count):
            acc_s[x] = float32(0)
        multiply_q_k(acc_s, q_frag, b_frag, own[0] + own_lane, k_tile + other_lane)
        for strip in range(strips):
            for n in range(blocks):
                for i in range(4):  # so that the product adds up to dP - delta
                    acc_dp[(strip * blocks + n) * 4 + i] = minus_delta[strip * 2 + i // 2]
        multiply_do_v(acc_dp, do_frag, b_frag, own[1] + own_lane, v_tile + other_lane)
        weigh(acc_s, acc_dp, ds_frag, lse_log2, slope, distance, first, end, scale, softcap, masked)
        multiply_ds_k(acc_dq, ds_frag, b_frag, k_tile + other_transposed)

    @cuda.jit
    def flash_attention_mma_dq(
        q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets, dq,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dq_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale_, softcap_,
    ):  # fmt: skip
        scale, softcap = float32(scale_), float32(softcap_)
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        b, h, h_kv, first_query = tile_of(block_index(), heads, heads_kv, seqlen_q)
        keys_, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        keys, tile_pos = int32(keys_), first_query + q_start
        queries_left = int32(min(seqlen_q - first_query, tile_m))

        smem = cuda.shared.array(0, uint8)
        q_smem = aligned(shared_address(smem))  # (tile_m, depth)
        own = (q_smem, q_smem + int32(do_at))  # Q and dO (tile_m, width)
        tiles = (q_smem + int32(k_at), q_smem + int32(v_at))  # two of K (tile_n, depth), two of V (tile_n, width)
        lanes = lanes_of(thread)

        acc_s = cuda.local.array(s_count, float32)  # (strips, tile_n / 8, 4)
        acc_dp = cuda.local.array(s_count, float32)  # (strips, tile_n / 8, 4)
        acc_dq = cuda.local.array(dq_count, float32)  # (strips, depth / 8, 4)
        ds_frag = cuda.local.array(frag_count, uint32)  # (strips, tile_n / 8, 2)
        q_frag = cuda.local.array(q_count, uint32)  # (strips, depth / 16, 4)
        do_frag = cuda.local.array(do_count, uint32)  # (strips, width / 16, 4)
        b_frag = cuda.local.array(4, uint32)  # (16, 16) of K or V
        lse_log2 = cuda.local.array(rows, float32)
        minus_delta = cuda.local.array(rows, float32)
        first = cuda.local.array(rows, int32)
        end = cuda.local.array(rows, int32)
        distance = cuda.local.array(rows, float32)
        fragments_ = (q_frag, do_frag, ds_frag, b_frag)
        for x in range(dq_count):
            acc_dq[x] = float32(0)

        top_first, top_end = row_keys(tile_pos, left, right, keys)
        bottom_first, bottom_end = row_keys(tile_pos + queries_left - 1, left, right, keys)
        begin_, free_, cut_, stop_ = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_n)
        begin, free, cut = int32(begin_), int32(free_), int32(cut_)
        j, odd = int32(stop_ - 1), int32(0)  # odd: which stage is in use
        if j >= begin:
            q_base = b * q_strides[0] + h * q_strides[1] + first_query * q_strides[2]
            do_base = b * do_strides[0] + h * do_strides[1] + first_query * do_strides[2]
            load_q(own[0], address(q, q_base), 2 * q_strides[2], 0, queries_left, head_dim, thread)
            load_do(own[1], address(do, do_base), 2 * do_strides[2], 0, queries_left, head_dim_v, thread)
            load_tile(j, odd, k, v, k_strides, v_strides, b, h_kv, tiles, keys, thread)
        commit()
        for r in range(rows):
            # A query that sees no key, or does not exist, has +inf for its lse: its weights are 0 then.
            query = first_query + warp * warp_rows + int32(first_row_of(lane)) + r * 8
            lse_log2[r] = inf
            minus_delta[r] = float32(0)
            if query < seqlen_q:
                row_lse = float32(lse[(b * heads + h) * seqlen_q + query]) * log2_e
                lse_log2[r] = inf if row_lse == -inf else row_lse
                minus_delta[r] = -float32(delta[(b * heads + h) * seqlen_q + query])
        slope = float32(0)
        if has_alibi:
            slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
        if in_registers:
            wait_all()
            cuda.syncthreads()
            load_q_frag(q_frag, own[0] + lanes[0])
            load_do_frag(do_frag, own[1] + lanes[0])

        while j >= begin:
            # Tiles that some row sees in part; then those that every row sees whole; then, behind a left window,
            # some of the first kind again.
            while j >= begin and (j >= cut or j < free):
                turn(j, odd, begin, k, v, k_strides, v_strides, tiles, keys, heads, heads_kv, seqlen_q)
                now = thread_index()
                limits(
                    j, (now >> int32(5)) * warp_rows, now & int32(31), tile_pos, left, right, keys,
                    first, end, distance,
                )  # fmt: skip
                products_of_tile(
                    odd, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, lse_log2, minus_delta, slope, distance,
                    first, end, scale, softcap, True,
                )  # fmt: skip
                j, odd = int32(j - 1), int32(odd ^ 1)
            while j >= free and j < cut:
                turn(j, odd, begin, k, v, k_strides, v_strides, tiles, keys, heads, heads_kv, seqlen_q)
                if has_alibi:
                    now = thread_index()
                    row = (now >> int32(5)) * warp_rows + int32(first_row_of(now & int32(31)))
                    column = int32(first_column_of(now & int32(31)))
                    for r in range(rows):
                        distance[r] = float32(tile_pos + row + r * 8 - int64(j) * tile_n - column)
                products_of_tile(
                    odd, acc_s, acc_dp, acc_dq, fragments_, own, tiles, lanes, lse_log2, minus_delta, slope, distance,
                    first, end, scale, softcap, False,
                )  # fmt: skip
                j, odd = int32(j - 1), int32(odd ^ 1)

        # dQ to the place of the warp's own rows of Q, and from there to global memory. Where all this belongs is worked
        # out again: kept through the loop, it would cost the registers that S needs.
        wait_all()
        b, h, h_kv, first_query = tile_of(block_index(), heads, heads_kv, seqlen_q)
        _, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
        queries_left = int32(min(seqlen_q - first_query, tile_m))
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        first_row = int32(warp * warp_rows)
        suspects = stage_dq(acc_dq, scale, own[0], first_row, lane, queries_left)
        base = b * dq_strides[0] + h * dq_strides[1] + first_query * dq_strides[2]
        store_dq(own[0], first_row, lane, dq, base, dq_strides[2], queries_left, suspects)
        if suspects != 0:
            repair_queries(
                suspects, first_row, lane, (q, k, v, do), (q_strides, k_strides, v_strides, do_strides),
                dq, dq_strides, lse, delta, slope, b, h, heads, h_kv, first_query, q_start, seqlen_q, keys,
                left, right, scale, softcap,
            )  # fmt: skip

    return flash_attention_mma_dq
