"""The gradient of aux: what each score owes to the numbers that its score_mod reads (kernels/score/owed.py).

The loops are those of v2_backward_dq.py: a block owns a tile of queries, and the keys pass by. S and dP are computed
again, and dS of each finished score is handed on. The kernel runs twice: config.of_bounds says for what.

Launch: grid (batch * heads * query tiles), block (tile_m), config.shared_bytes of dynamic shared memory.
"""

from numba import cuda, int64

from ...ptx import local, shared
from ..score import At, around_score_mod, owed, positions, user
from ..score.owed import Run
from ..steps import ds_rows, elements, tiles
from ..steps.ds_rows import Row, RowTiles
from ..steps.inlined import TRUE
from ..steps.plain import row_keys
from ..steps.sequence import key_range, lse_row
from ..steps.tiles import row_base


def make(config):
    plan = config.shared_layout()
    q_row, do_row, s_row = config.k_row + config.pad, config.v_row + config.pad, config.tile_n + config.pad
    to_product = plan.products - plan.ds
    compute = elements.COMPUTE_TYPES[config.dtype]
    load = elements.loader(config.dtype, compute)
    load_q = tiles.loader(load, compute(0), config.tile_m, q_row, config.head_dim)
    load_do = tiles.loader(load, compute(0), config.tile_m, do_row, config.head_dim_v)
    load_k = tiles.loader(load, compute(0), config.tile_n, config.k_row, config.head_dim)
    load_v = tiles.loader(load, compute(0), config.tile_n, config.v_row, config.head_dim_v)
    keys_and_start = positions.make(config)
    ds_row = ds_rows.make(config, of_product=False, products_at=to_product)
    ask, (before, behind) = user.recorded(config), around_score_mod(config)
    words, (start, add, finish) = owed.words(config.compute_dtype), owed.make(config)

    @cuda.jit
    def flash_attention_v2_daux(arrays, strides, sizes, score):
        heads, seqlen_q, left, right = sizes.heads, sizes.seqlen_q, sizes.left, sizes.right
        thread = cuda.threadIdx.x
        m_tiles = (seqlen_q + config.tile_m - 1) // config.tile_m
        b = cuda.blockIdx.x // (heads * m_tiles)
        h = cuda.blockIdx.x // m_tiles % heads
        first_row = cuda.blockIdx.x % m_tiles * config.tile_m
        h_kv = h // (heads // sizes.heads_kv)
        keys, q_start = keys_and_start(b, arrays, strides, sizes)

        smem = cuda.shared.array(0, compute)
        q_smem = shared.pointer(smem, plan.q)  # (tile_m, q_row)
        do_smem = shared.pointer(smem, plan.do)  # (tile_m, do_row)
        k_smem = shared.pointer(smem, plan.k)  # (tile_n, k_row)
        v_smem = shared.pointer(smem, plan.v)  # (tile_n, v_row)
        ds_smem = shared.pointer(smem, plan.ds)  # (2, tile_m, s_row): dS, and q . k

        q_base, do_base = row_base(strides.q, b, h, first_row), row_base(strides.do, b, h, first_row)
        load_q(q_smem, arrays.q, q_base, strides.q, seqlen_q - first_row, thread, config.tile_m)
        load_do(do_smem, arrays.do, do_base, strides.do, seqlen_q - first_row, thread, config.tile_m)
        q_index = first_row + thread
        q_pos = q_index + q_start
        first_key, end_key = row_keys(q_pos, left, right, keys)
        q_k, do_k, s_k = thread * q_row, thread * do_row, thread * s_row
        lse_at = lse_row(b, h, min(q_index, seqlen_q - 1), sizes)
        own_row = Row(b, h, q_index, q_pos, first_key, end_key, arrays.lse[lse_at], arrays.delta[lse_at])
        tiles_of_row = RowTiles(q_smem, q_k, do_smem, do_k, ds_smem, s_k, k_smem, v_smem)
        run = Run(
            local.array(1, int64),
            local.array(words, int64),
            local.array(2, compute),
            local.array(1, int64),
        )
        start(run)

        last_row = min(first_row + config.tile_m, seqlen_q) - 1
        begin, _, _, end = key_range(first_row + q_start, last_row + q_start, keys, sizes, config.tile_n)
        for j in range(begin, end):
            cuda.syncthreads()  # everyone is done with the tiles before
            first_y = j * config.tile_n
            k_base, v_base = row_base(strides.k, b, h_kv, first_y), row_base(strides.v, b, h_kv, first_y)
            load_k(k_smem, arrays.k, k_base, strides.k, keys - first_y, thread, config.tile_m)
            load_v(v_smem, arrays.v, v_base, strides.v, keys - first_y, thread, config.tile_m)
            cuda.syncthreads()
            if q_index < seqlen_q:
                ds_row(own_row, tiles_of_row, first_y, TRUE, arrays, strides, sizes, score)
                for y in range(min(config.tile_n, keys - first_y)):
                    ds = ds_smem[s_k + y]
                    if ds != 0:
                        at = At(b, h, q_index, first_y + y, q_pos)
                        s = before(ds_smem[s_k + to_product + y], at, arrays, strides, score)
                        y_mod, slope, place, reads = ask(s, at, 0, arrays, strides, sizes)
                        _, through = behind(y_mod, at, arrays, strides, score)
                        add(run, ds * through, s, slope, place, reads, at, arrays, strides, sizes)
        finish(run, arrays, sizes)

    return flash_attention_v2_daux
