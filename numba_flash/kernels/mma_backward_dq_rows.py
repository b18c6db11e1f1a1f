"""dQ in 16 bits from the float32 sums that mma_backward_dkdv's blocks have added up, each tile's in the order in which
its threads held them.

Launch: grid (batch * heads * query tiles), block (config.threads), config.shared_bytes of dynamic shared memory.
"""

from numba import cuda, float32, int32, int64, uint8, uint32

from ..ptx import cvt, fragments, ld_st, shared, shfl, special
from .steps import elements, fragment_products, fragment_scores, gradient_rows, score_gradients, scores
from .steps import repair_queries as repair_queries_step
from .steps.integers import divide


def make(config):
    tile_m, threads, head_dim, steps = config.tile_m, config.threads, config.head_dim, config.depth // 16
    dq_strips, dq_pairs, dq_tile = config.dq_rows // 16, config.dq_columns // 16, config.dq_tile
    dq_groups, rows = tile_m // config.dq_rows, tile_m * 32 // threads  # rows of dQ that a warp writes
    _, notes_at, _ = config.shared_offsets()
    alignment = config.ALIGNMENT
    has_alibi = config.alibi_dtype is not None
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    head, _ = scores.make(config)
    one_score, _, _, _ = fragment_scores.make(config, 1)
    repair_queries = repair_queries_step.make(config, *score_gradients.make(config, one_score))
    _, store = gradient_rows.make(config.dtype, tile_m, rows, head_dim)
    load_slope = elements.loader(config.alibi_dtype or "float32", float32)
    panel_offset, bfly = fragment_products.panel_offset, shfl.bfly_b32
    load_b32, store_shared = ld_st.load_b32, ld_st.store_b32
    thread_index, block_index, shared_address = special.thread_index, special.block_index, shared.address
    first_row_of, first_column_of = cuda.jit(device=True)(fragments.row), cuda.jit(device=True)(fragments.column)

    @cuda.jit
    def flash_attention_mma_dq_rows(
        q, k, v, do, lse, delta, alibi_slopes, seqlens_k, q_offsets, dq, dq_sums, turns,
        q_strides, k_strides, v_strides, do_strides, alibi_strides, batch_strides, dq_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale_, softcap_,
    ):  # fmt: skip
        scale, softcap = float32(scale_), float32(softcap_)
        thread, tile = thread_index(), block_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        m_tiles = divide(int32(seqlen_q) + int32(tile_m - 1), tile_m)
        head_of_all = divide(tile, m_tiles)
        first_query = int32((tile - head_of_all * m_tiles) * tile_m)
        b = divide(head_of_all, heads)
        h = int32(head_of_all - b * heads)
        queries_left = int32(min(seqlen_q - first_query, tile_m))

        smem = cuda.shared.array(0, uint8)
        dq_smem = (shared_address(smem) + int32(alignment - 1)) & int32(-alignment)  # (tile_m, depth)
        notes = dq_smem + int32(notes_at)  # (tile_m,): not 0 where a row is not finite
        if thread < tile_m:
            store_shared(notes + 4 * thread, uint32(0))
        cuda.syncthreads()
        anything = turns[tile] != 0  # else no key sees a query of this tile, and there are no sums
        base = int64(tile) * dq_tile + thread
        first_row = int32(warp % dq_groups) * (16 * dq_strips) + int32(first_row_of(lane))
        pair, column = int32(warp // dq_groups) * dq_pairs, int32(first_column_of(lane))
        for m in range(dq_strips):
            for x in range(dq_pairs):
                if pair + x < steps:
                    for half in range(2):
                        for below in range(2):
                            at = base + ((m * dq_pairs + x) * 8 + half * 4 + below * 2) * threads
                            row = first_row + m * 16 + below * 8
                            low, high = float32(0), float32(0)
                            if anything and row < queries_left:
                                low, high = dq_sums[at] * scale, dq_sums[at + threads] * scale
                            place = dq_smem + panel_offset(row, (pair + x) * 2 + half, tile_m)
                            store_shared(place + 2 * column, pack(low, high))
                            if low * float32(0) + high * float32(0) != 0:  # NaN or Inf
                                store_shared(notes + 4 * row, uint32(1))
        cuda.syncthreads()
        first_row = int32(warp * rows)
        suspects = uint32(0)
        if lane < rows:
            suspects = uint32(load_b32(notes + 4 * (first_row + lane)) << uint32(lane))
        for distance in (1, 2, 4, 8, 16):
            suspects |= bfly(suspects, distance)
        at = b * dq_strides[0] + h * dq_strides[1] + first_query * dq_strides[2]
        store(dq_smem, first_row, lane, dq, at, dq_strides[2], queries_left, suspects)
        if suspects != 0:
            keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)
            slope = float32(0)
            if has_alibi:
                slope = load_slope(alibi_slopes, b * alibi_strides[0] + h * alibi_strides[1])
            repair_queries(
                suspects, first_row, lane, (q, k, v, do), (q_strides, k_strides, v_strides, do_strides),
                dq, dq_strides, lse, delta, slope, b, h, heads, divide(h, divide(heads, heads_kv)), first_query,
                q_start, seqlen_q, keys, left, right, scale, softcap,
            )  # fmt: skip

    return flash_attention_mma_dq_rows
