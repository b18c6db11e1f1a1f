"""dK and dV of FlashAttention-2, two threads per key row.

Source: the backward equations of the notes that begin with "The goal of flash attention",

    (1) dV = P^T dO    (2) dP = dO V^T    (3) dS = dsoftmax(dP) = P * (dP - delta)    (5) dK = dS^T Q

(the notes write Q dS^T for (5), whose shapes do not fit), and the recomputation of P from the log-sum-exp, "2. Store
the Logsumexp instead of l, m for backward" in section 4 of "flash attention from math to code": P = e^(S - lse).
Letters: s is a score, p its weight, dp and ds their gradients; delta is that of kernels/delta.py. TileQ is tile_m,
TileK is tile_n.

The loops are those of v1: a block owns one tile of keys and the queries pass by, those of every head that reads this
KV head, so that sums over queries and heads stay on chip and nothing is added up in global memory. Of a key's two
threads one computes S, P and dV, the other dP, dS and dK: twice as many sums fit into registers, and each has as
much to do as the other.

Launch: grid (batch * heads_kv * key tiles), block (2 * tile_n), config.shared_bytes of dynamic shared memory. Any
lengths: threads past the last key take part in loads and barriers and store nothing.
"""

from numba import cuda

from .. import ranges
from ..ptx import shared
from .steps import elements, rows, tiles, weights

key_queries = cuda.jit(device=True)(ranges.key_queries)
key_tiles = cuda.jit(device=True)(ranges.key_tiles)


def make(config):
    tile_m, tile_n, threads = config.tile_m, config.tile_n, config.threads
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    k_at, v_at, q_at, do_at, p_at, ds_at, through_at, _ = config.shared_offsets()
    q_row, do_row = config.k_row, config.v_row  # head_dim and head_dim_v, rounded up to whole steps
    k_row, v_row, s_row = q_row + config.pad, do_row + config.pad, tile_m + config.pad
    sums = max(q_row, do_row)
    write_dk, write_dv, has_softcap = "dk" in config.wanted, "dv" in config.wanted, config.softcap
    compute = elements.COMPUTE_TYPES[config.dtype]
    load, store = elements.loader(config.dtype, compute), elements.storer(config.dtype)
    load_tile = tiles.loader(load, compute(0))
    head, weight = weights.make(config)
    at_once = rows.at_once(tile_m)
    dot_q, dot_do = rows.dots(q_row, at_once, compute(0)), rows.dots(do_row, at_once, compute(0))
    add_q = rows.adder(q_row, tile_m, config.dtype, compute)
    add_do = rows.adder(do_row, tile_m, config.dtype, compute)

    @cuda.jit
    def flash_attention_v2_dkdv(
        q, k, v, do, lse, delta, bias, mask, alibi_slopes, seqlens_k, q_offsets, dk, dv,
        q_strides, k_strides, v_strides, do_strides, bias_strides, mask_strides, alibi_strides, batch_strides,
        dk_strides, dv_strides,
        batch, heads, heads_kv, seqlen_q, seqlen_k, left, right, q_offset, scale, softcap,
    ):  # fmt: skip
        thread = cuda.threadIdx.x
        n_tiles = (seqlen_k + tile_n - 1) // tile_n
        b = cuda.blockIdx.x // (heads_kv * n_tiles)
        h_kv = cuda.blockIdx.x // n_tiles % heads_kv
        first_y = cuda.blockIdx.x % n_tiles * tile_n
        group = heads // heads_kv
        keys, q_start = head(b, seqlens_k, q_offsets, batch_strides, seqlen_k, q_offset)

        smem = cuda.shared.array(0, compute)
        k_smem = shared.pointer(smem, k_at)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, v_at)  # (tile_n, v_row)
        q_smem = shared.pointer(smem, q_at)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, do_at)  # (tile_m, do_row)
        p_smem = shared.pointer(smem, p_at)  # (tile_n, s_row)
        ds_smem = shared.pointer(smem, ds_at)  # (tile_n, s_row): dP, then dS
        through_smem = shared.pointer(smem, through_at)  # (tile_n, s_row)
        products = cuda.local.array(at_once, compute)  # (at_once,)
        acc = cuda.local.array(sums, compute)  # (sums,): this thread's row of dV_j or of dK_j, in registers

        k_base = b * k_strides[0] + h_kv * k_strides[1] + first_y * k_strides[2]
        v_base = b * v_strides[0] + h_kv * v_strides[1] + first_y * v_strides[2]
        left_over = keys - first_y
        load_tile(k_smem, tile_n, k_row, k, k_base, k_strides[2], k_strides[3], left_over, head_dim, thread, threads)
        load_tile(v_smem, tile_n, v_row, v, v_base, v_strides[2], v_strides[3], left_over, head_dim_v, thread, threads)

        of_p = thread < tile_n  # else of dP
        y = thread if of_p else thread - tile_n
        k_index = first_y + y
        k_y, v_y, s_y = y * k_row, y * v_row, y * s_row  # where row y begins in K_j, V_j, and P and dS
        for x in range(sums):
            acc[x] = compute(0)

        # the queries that see this key, and the query tiles that see some key of the block
        first_query, end_query = key_queries(k_index, q_start, left, right, seqlen_q)
        if k_index >= keys:
            end_query = first_query
        top_first, top_end = key_queries(first_y, q_start, left, right, seqlen_q)
        last_y = min(first_y + tile_n, keys) - 1
        bottom_first, bottom_end = key_queries(last_y, q_start, left, right, seqlen_q)
        begin, _, _, end = key_tiles(top_first, top_end, bottom_first, bottom_end, tile_m)
        if last_y < first_y:
            end = begin
        for h in range(h_kv * group, (h_kv + 1) * group):
            lse_base = (b * heads + h) * seqlen_q  # and of delta
            for i in range(begin, end):
                cuda.syncthreads()  # everyone is done with the tiles before
                first_row = i * tile_m
                q_base = b * q_strides[0] + h * q_strides[1] + first_row * q_strides[2]
                do_base = b * do_strides[0] + h * do_strides[1] + first_row * do_strides[2]
                left_over = seqlen_q - first_row
                load_tile(
                    q_smem, tile_m, q_row, q, q_base, q_strides[2], q_strides[3], left_over, head_dim, thread, threads
                )
                load_tile(
                    do_smem, tile_m, do_row, do, do_base, do_strides[2], do_strides[3], left_over, head_dim_v, thread,
                    threads,
                )  # fmt: skip
                cuda.syncthreads()
                for row in range(0, tile_m, at_once):
                    if of_p:  # P[:, y] = e^(Q_i K_j[y, :]^T - lse)
                        dot_q(products, k_smem, k_y, q_smem, row * q_row)
                        for u in range(at_once):
                            q_index = first_row + row + u
                            p, through = compute(0), compute(0)
                            if first_query <= q_index and q_index < end_query:
                                p, through = weight(
                                    products[u], lse[lse_base + q_index], b, h, q_index, k_index, q_index + q_start,
                                    bias, mask, alibi_slopes, bias_strides, mask_strides, alibi_strides, scale, softcap,
                                )  # fmt: skip
                            p_smem[s_y + row + u] = p
                            if has_softcap:
                                through_smem[s_y + row + u] = through
                    else:  # (2): dP[:, y] = dO_i V_j[y, :]^T
                        dot_do(products, v_smem, v_y, do_smem, row * do_row)
                        for u in range(at_once):
                            ds_smem[s_y + row + u] = products[u]
                cuda.syncthreads()
                if of_p:
                    if write_dv:  # (1): dV_j[y, :] += P[:, y]^T dO_i
                        add_do(acc, p_smem, s_y, do_smem)
                elif write_dk:
                    for row in range(tile_m):  # (3)
                        p = p_smem[s_y + row]
                        ds = compute(0)
                        if p != 0:  # else dP may be NaN or Inf, of a key that is not seen
                            ds = p * (ds_smem[s_y + row] - delta[lse_base + first_row + row])
                            if has_softcap:
                                ds *= through_smem[s_y + row]
                        ds_smem[s_y + row] = ds
                    add_q(acc, ds_smem, s_y, q_smem)  # (5): dK_j[y, :] += dS[:, y]^T Q_i

        if k_index < seqlen_k:
            if of_p:
                if write_dv:
                    base = b * dv_strides[0] + h_kv * dv_strides[1] + k_index * dv_strides[2]
                    for x in range(head_dim_v):
                        store(dv, base + x * dv_strides[3], acc[x])
            elif write_dk:  # scale, by which S has Q K^T, comes in once
                base = b * dk_strides[0] + h_kv * dk_strides[1] + k_index * dk_strides[2]
                for x in range(head_dim):
                    store(dk, base + x * dk_strides[3], acc[x] * compute(scale))

    return flash_attention_v2_dkdv
