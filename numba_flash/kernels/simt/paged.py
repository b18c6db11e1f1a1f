"""v2 over a cache whose keys lie in pages: listing 5 of docs/first_kernels.md, with one more step for a key's address.

It is v2 (v2.py, with the letters), but for three things. A row of a tile of K or V is found in its page. A sequence may
have any number of queries. No tile is skipped for a mask_mod, because its states would need the pages, too.

Numbers of pages are clamped, because the host cannot look at them without waiting; rows behind the valid keys are not
read at all. Addresses are int64 from the page on: a pool may have more than 2^31 elements.

Launch: grid (batch * heads * query tiles), block (tile_m).
"""

import math

from numba import cuda, int64

from ...ptx import local, shared
from ..score import at_key, sum_terms
from ..score import make as make_score
from ..steps import elements, pages, rows, sequence, tiles
from ..steps.inlined import TRUE
from ..steps.sequence import Sequence, key_range, kv_head, lse_row, query_of, query_row, span


def make(config):
    plan, compute, of_scores = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype], config.scores
    q_row, s_row = config.k_row + config.pad, config.tile_n + config.pad
    load_q = tiles.query_loader(of_scores, q_row, config.head_dim)
    load_k, load_v = (
        _loader(config, *of) for of in ((config.k_row, config.head_dim), (config.v_row, config.head_dim_v))
    )
    keys_at_once = rows.at_once(config.tile_n)
    dot_rows = rows.dots(config.k_row, keys_at_once, compute(0))
    add_rows = rows.adder(config.v_row, config.tile_n, config.dtype, compute)
    store, minus_inf = elements.storer(config.dtype), compute(-math.inf)
    sequence_of, scores, first_m_and_l = _sequence(config), make_score(of_scores), sum_terms.start(of_scores)
    packed = config.packed

    @cuda.jit
    def flash_attention_paged(arrays, strides, sizes, score):
        thread = cuda.threadIdx.x
        m_tiles = (sizes.seqlen_q + config.tile_m - 1) // config.tile_m
        i = cuda.blockIdx.x % m_tiles  # listing 5, line 1: one block for each i
        h = cuda.blockIdx.x // m_tiles % sizes.heads
        h_kv = kv_head(h, sizes)
        sequence = sequence_of(cuda.blockIdx.x // (sizes.heads * m_tiles), arrays, strides, sizes)

        smem = cuda.shared.array(0, compute)  # 0: the launch says how much
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        s_smem = shared.pointer(smem, plan.s)  # (tile_m, s_row)
        s_part = local.array(keys_at_once, compute)  # (keys_at_once,)
        o_k = local.array(config.v_row, compute)  # (v_row,): row k of O_i, in registers

        # line 2: load Q_i
        first_row = i * config.tile_m
        if packed:
            if first_row >= sequence.seqlen_q:
                return
        load_q(q_smem, arrays.q, strides.q, sequence, h, first_row, thread)

        # lines 3 and 4: this thread's row k, and its m, l and O
        q_index = first_row + thread
        query = query_of(sequence, h, q_index, sizes)
        q_k, s_k = thread * q_row, thread * s_row  # where row k begins in Q_i and S
        m, l = first_m_and_l(sequence.b, h, arrays, strides)  # -inf and 0, or a sink and 1
        for x in range(config.v_row):
            o_k[x] = compute(0)

        # line 5: the tiles that some row of the block sees
        last_row = min(first_row + config.tile_m, sequence.seqlen_q) - 1
        begin, _, _, end = key_range(sequence, first_row, last_row, sizes, config.tile_n)
        for j in range(begin, end):
            cuda.syncthreads()  # line 6: everyone is done with the tiles before
            first_y = j * config.tile_n
            load_k(k_smem, arrays.k, strides.k, sequence, h_kv, first_y, thread, arrays, strides, sizes)
            load_v(v_smem, arrays.v, strides.v, sequence, h_kv, first_y, thread, arrays, strides, sizes)
            cuda.syncthreads()
            if q_index < sequence.seqlen_q:
                # lines 7 to 11: S[k, :] = Q_i[k, :] . K_j^T and its maximum
                max_tmp = minus_inf
                sees = False
                for y in range(0, config.tile_n, keys_at_once):
                    dot_rows(s_part, q_smem, q_k, k_smem, y * config.k_row)
                    for u in range(keys_at_once):
                        s = scores.masked(s_part[u], query, first_y + y + u, TRUE, arrays, strides, score)
                        s_smem[s_k + y + u] = s
                        max_tmp = max(max_tmp, s)
                        sees = sees or s != minus_inf
                if sees:  # line 12: else m_new could still be -inf, and -inf - -inf is NaN
                    # lines 13 to 17
                    m_new = max(max_tmp, m)
                    alpha = math.exp(m - m_new)
                    sum_tmp = compute(0)
                    for y in range(config.tile_n):
                        p = math.exp(s_smem[s_k + y] - m_new)
                        s_smem[s_k + y] = p * scores.weight_factor(at_key(query, first_y + y), arrays, sizes, score)
                        sum_tmp += p
                    l = alpha * l + sum_tmp
                    m = m_new
                    # line 18: O_i[k, :] = alpha * O_i[k, :] + P[k, :] . V_j
                    add_rows(o_k, alpha, s_smem, s_k, v_smem, 0)

        # lines 19 and 20: the one division. A row without keys is zero, and its lse -inf
        if q_index < sequence.seqlen_q:
            inverse = compute(0)
            row_lse = minus_inf
            if l != 0:
                inverse = compute(1) / l
                row_lse = m + math.log(l)
            o_base = query_row(strides.o, sequence, h, q_index)
            for x in range(config.head_dim_v):
                store(arrays.o, o_base + x * strides.o[3], o_k[x] * inverse)
            if config.write_lse:
                arrays.lse[lse_row(sequence, h, q_index, sizes)] = row_lse

    return flash_attention_paged


def _sequence(config):
    """-> sequence_of(b, arrays, strides, sizes). Lengths are clamped already (append.py), in seqlens_k."""
    if not config.packed:
        return sequence.make(config.scores)
    from_lengths, from_array = config.q_offset_source == "sequence", config.q_offset_source == "array"

    @cuda.jit(device=True)
    def sequence_of(b, arrays, strides, sizes):
        first, queries = span(arrays.cu_seqlens_q, b, strides.cu_seqlens_q, sizes.total_q, sizes.seqlen_q)
        keys, q_start = int64(arrays.seqlens_k[b * strides.seqlens_k]), sizes.q_offset
        if from_lengths:
            q_start = q_start + keys - queries
        if from_array:
            q_start = q_start + int64(arrays.q_offset[b * strides.q_offset])
        return Sequence(b, queries, keys, q_start, int64(0), first, int64(0), sizes.total_q, sizes.batch)

    return sequence_of


def _loader(config, tile_row, columns):
    """-> load(tile, source, strides, sequence, h_kv, first_row, thread, arrays, all strides, sizes): a tile of K or V,
    row by row from their pages, with zeros around it. Keys that are not valid are not read."""
    compute, first = elements.COMPUTE_TYPES[config.dtype], _first_of_aux(config)
    load_element, zero, page_of = elements.loader(config.dtype, compute), compute(0), pages.finder(config.pages)
    tile_rows, threads, second = config.tile_n, config.threads, first + (config.pages == "csr")
    by_first = _first_of_aux(config, "strides")
    by_second = by_first + (config.pages == "csr")

    @cuda.jit(device=True)
    def load(tile, source, by, sequence, h_kv, first_row, thread, arrays, strides, sizes):
        for index in range(thread, tile_rows * tile_row, threads):
            row, column = index // tile_row, index % tile_row
            value = zero
            key = int64(first_row + row)
            if key < sequence.keys and column < columns:
                number, at = key // sizes.page, key % sizes.page
                page = page_of(sequence.b, number, arrays[first], arrays[second], strides[by_first], strides[by_second])
                page = min(max(page, int64(0)), sizes.pages - 1)
                value = load_element(source, page * by[0] + h_kv * by[1] + at * by[2] + column * by[3])
            tile[index] = value

    return load


def _first_of_aux(config, kind="arrays"):
    """The index of the first array that says where pages are; of none, any."""
    names = getattr(config.parameters, kind)
    return names.index("aux0") if "aux0" in names else 0
