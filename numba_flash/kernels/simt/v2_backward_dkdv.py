"""dK and dV of FlashAttention-2, two threads per key row: listing 7 of docs/backward.md.

Source: Dao, FlashAttention-2 (2023), algorithm 2; equations 13 to 15 and 18 of docs/backward.md. P is computed again
from lse: P = e^(S - lse), equation 11 of docs/algorithm.md. Letters: s is a score, p its weight, dp, ds the gradients.
delta is that of delta.py.

The loops are those of v1. A block owns one tile of keys and the queries pass by, those of every head that reads this
KV head. So sums over queries and heads stay on chip, and nothing is added up in global memory. Of a key's two threads
one computes S, P and dV, the other dP, dS and dK, so that twice as many sums fit into registers. Both run the same
code: the first multiplies its row of K by Q_i and then its row of P by dO_i, the second its row of V by dO_i and then
its row of dS by Q_i. So K_j and V_j lie one behind the other, and likewise Q_i and dO_i, and P and dS.

Launch: grid (batch * heads_kv * key tiles), block (2 * tile_n). Any lengths: threads past the last key take part in
loads and barriers and store nothing.
"""

from numba import cuda

from ...ptx import local, shared
from ..score import at_position, make as make_score, tile_walk
from ..steps import elements, rows, sequence, tiles
from ..steps.basics import key_queries
from ..steps.sequence import key_row, lse_row, query_range


def make(config):
    plan, compute = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype]
    width, kv_row, s_row = config.row, config.row + config.pad, config.tile_m + config.pad
    write_dk, write_dv, varies = "dk" in config.wanted, "dv" in config.wanted, config.derivative_varies
    load_k = tiles.key_loader(config, kv_row, config.head_dim)
    load_v = tiles.key_loader(config, kv_row, config.head_dim_v)
    load_q = tiles.query_loader(config, width, config.head_dim)
    load_do = tiles.query_loader(config, width, config.head_dim_v)
    at_once = rows.at_once(config.tile_m, config.dtype)
    dot_rows = rows.dots(width, at_once, compute(0))
    add_rows = rows.adder(width, config.tile_m, config.dtype, compute)
    sequence_of, scores = sequence.make(config), make_score(config)
    walk, store = tile_walk.make(config), elements.storer(config.dtype)

    @cuda.jit
    def flash_attention_v2_dkdv(arrays, strides, sizes, score):
        thread = cuda.threadIdx.x
        n_tiles = (sizes.seqlen_k + config.tile_n - 1) // config.tile_n
        first_y = cuda.blockIdx.x % n_tiles * config.tile_n
        h_kv = cuda.blockIdx.x // n_tiles % sizes.heads_kv
        b = cuda.blockIdx.x // (sizes.heads_kv * n_tiles)
        sequence = sequence_of(b, arrays, strides, sizes)
        group, end_y = sizes.heads // sizes.heads_kv, sizes.seqlen_k
        if config.packed:  # outside.py writes what is behind the valid keys
            end_y = sequence.keys
            if first_y >= end_y:
                return

        smem = cuda.shared.array(0, compute)
        kv_smem = shared.pointer(smem, plan.kv)  # (2 * tile_n, kv_row): K_j, V_j
        v_smem = shared.pointer(smem, plan.kv + config.tile_n * kv_row)
        qdo_smem = shared.pointer(smem, plan.qdo)  # (2 * tile_m, width): Q_i, dO_i
        do_smem = shared.pointer(smem, plan.qdo + config.tile_m * width)
        weights_smem = shared.pointer(smem, plan.weights)  # (2 * tile_n, s_row): P, dS
        derivative_smem = shared.pointer(smem, plan.derivative)  # (tile_n, s_row)
        products = local.array(at_once, compute)  # (at_once,)
        acc = local.array(width, compute)  # (width,): this thread's width of dV_j or of dK_j, in registers

        # line 1: load K_j, V_j
        load_k(kv_smem, arrays.k, strides.k, sequence, h_kv, first_y, thread)
        load_v(v_smem, arrays.v, strides.v, sequence, h_kv, first_y, thread)

        of_p = thread < config.tile_n  # line 2: the first thread of a key, else the second
        k_index = first_y + thread % config.tile_n
        kv_y, s_y = thread * kv_row, thread * s_row  # where this thread's width begins in K_j, V_j and in P, dS
        # where the tiles begin that its width, and then its weights, are multiplied by
        first, second = (0, config.tile_m * width) if of_p else (config.tile_m * width, 0)
        is_wanted = write_dv if of_p else write_dk
        for x in range(width):
            acc[x] = compute(0)

        # the queries that see this key, and the query tiles that see some key of the block
        first_query, end_query = key_queries(k_index, sequence.q_start, sizes.left, sizes.right, sequence.seqlen_q)
        if k_index >= sequence.keys:
            end_query = first_query
        last_y = min(first_y + config.tile_n, sequence.keys) - 1
        begin, _, _, end = query_range(sequence, first_y, last_y, sizes, config.tile_m)
        if last_y < first_y:
            end = begin
        for h in range(h_kv * group, (h_kv + 1) * group):  # line 3
            lse_base = lse_row(sequence, h, 0, sizes)  # and of delta
            mask_row = walk.row(b, h, first_y, arrays, strides)
            for i in range(begin, end):
                if not walk.is_nonempty(mask_row, i, arrays, strides):  # mask_mod removes all of the tile
                    continue
                needs_mask = walk.needs_mask(mask_row, i, arrays, strides)
                cuda.syncthreads()  # line 4: everyone is done with the tiles before
                first_row = i * config.tile_m
                load_q(qdo_smem, arrays.q, strides.q, sequence, h, first_row, thread)
                load_do(do_smem, arrays.do, strides.do, sequence, h, first_row, thread)
                cuda.syncthreads()
                for row in range(0, config.tile_m, at_once):  # lines 5 to 7: S = Q_i K_j^T, and dP
                    dot_rows(products, kv_smem, kv_y, qdo_smem, first + row * width)
                    for u in range(at_once):
                        product, q_index = products[u], first_row + row + u
                        if of_p:
                            p, derivative = compute(0), compute(0)
                            if first_query <= q_index and q_index < end_query:
                                at = at_position(b, h, q_index, k_index, q_index + sequence.q_start)
                                row_lse = arrays.lse[lse_base + q_index]
                                p, derivative = scores.weight(product, row_lse, at, needs_mask, arrays, strides, score)
                            product = p
                            if varies:
                                derivative_smem[s_y + row + u] = derivative
                        weights_smem[s_y + row + u] = product
                cuda.syncthreads()
                if not of_p:
                    s_p = s_y - config.tile_n * s_row  # where the other thread's width of P begins
                    for row in range(config.tile_m):  # line 9
                        p = weights_smem[s_p + row]
                        ds = compute(0)
                        if p != 0:  # otherwise the key is not seen, and dP may be NaN or Inf
                            at = at_position(b, h, first_row + row, k_index, first_row + row + sequence.q_start)
                            factor = scores.weight_factor(at, arrays, sizes, score)
                            dp = weights_smem[s_y + row] * factor if factor != 0 else compute(0)
                            ds = p * (dp - arrays.delta[lse_base + first_row + row])
                            if varies:
                                ds *= derivative_smem[s_p + row]
                        weights_smem[s_y + row] = ds
                if config.seeded:
                    cuda.syncthreads()  # the other thread has read P
                    if of_p:
                        for row in range(config.tile_m):
                            at = at_position(b, h, first_row + row, k_index, first_row + row + sequence.q_start)
                            weights_smem[s_y + row] *= scores.weight_factor(at, arrays, sizes, score)
                if is_wanted:  # lines 10 and 11
                    add_rows(acc, compute(1), weights_smem, s_y, qdo_smem, second)

        if k_index < end_y:  # line 12
            if of_p:
                if write_dv:
                    base = key_row(strides.dv, sequence, h_kv, k_index)
                    for x in range(config.head_dim_v):
                        store(arrays.dv, base + x * strides.dv[3], acc[x])
            elif write_dk:  # scale, by which S has Q K^T, comes in once
                base = key_row(strides.dk, sequence, h_kv, k_index)
                for x in range(config.head_dim):
                    store(arrays.dk, base + x * strides.dk[3], acc[x] * compute(score.scale))

    return flash_attention_v2_dkdv
