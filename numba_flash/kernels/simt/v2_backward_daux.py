"""The gradient of aux: what each score owes to the numbers that its score_mod reads (kernels/score/aux_gradient.py).

The loops are those of v2_backward_dq.py: a block owns a tile of queries, and the keys pass by. S and dP are computed
again, and dS of each finished score is handed on.

Launch: grid (batch * heads * query tiles), block (tile_m).
"""

from numba import cuda, int64

from ...ptx import local
from ..score import around_score_mod, at_key, aux_gradient, user
from ..score.aux_gradient import Run
from ..steps import elements
from ..steps.basics import inlined
from . import ds_rows


def make(config):
    plan, compute = config.shared_layout(), elements.COMPUTE_TYPES[config.dtype]
    to_product, count = plan.products - plan.ds, len(config.wanted_aux)
    ask, (before, after), aux = user.recorded(config), around_score_mod(config), aux_gradient.make(config)

    @inlined
    def add_to_aux(run, query, tiles, first_y, arrays, strides, sizes, score):
        for y in range(config.tile_n):  # dS of keys that are not seen is 0
            ds = tiles.ds[tiles.ds_at + y]
            if ds != 0:
                at = at_key(query, first_y + y)
                s = before(tiles.ds[tiles.ds_at + to_product + y], at, arrays, strides, score)
                y_mod, slope, place, reads = ask(s, at, 0, arrays, strides, sizes)
                _, through = after(y_mod, at, arrays, strides, score)
                aux.add(run, ds * through, s, slope, place, reads, at, arrays, strides, sizes)

    ds = ds_rows.make(config, False, add_to_aux, to_product)

    @cuda.jit
    def flash_attention_v2_daux(arrays, strides, sizes, score):
        sequence, h, first_row = ds.query_tile(cuda.blockIdx.x, arrays, strides, sizes)
        if config.packed:
            if first_row >= sequence.seqlen_q:
                return
        run = Run(local.array(count, int64), local.array(count, compute))
        aux.start(run)
        tiles, n_tiles = ds.row_tiles(cuda.threadIdx.x), (sizes.seqlen_k + config.tile_n - 1) // config.tile_n
        ds.over_keys(run, tiles, sequence, h, first_row, 0, n_tiles, arrays, strides, sizes, score)
        aux.finish(run, arrays, sizes)

    return flash_attention_v2_daux
