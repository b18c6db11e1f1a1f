"""How a consumer of wgmma/backward_fused computes P and dS from a tile of S and dP. Rows of the tile are the block's
own keys, and columns are queries. Of the options there are a bias, a mask and dropped weights.

backward_scores.py, of the other two kernels, computes all of P before dP. Here half of P comes beside dP, and the
accumulators of S and dP may begin with -lse and -delta (backward_products.py).
"""

import numpy as np
from numba import float32, uint32

from ...ptx import ld_st, local
from ..score import fragments
from ..score.stage import FragmentAt
from ..steps import elements
from ..steps.basics import FALSE, TRUE, inlined, named
from . import bias_boxes
from .backward_scores import gradients, is_set, place_of_columns
from .block import rows_of_lane


def make(config):
    """-> device functions. weights_of(first, end) makes one for those pairs of 8 columns. lse_and_delta: the shared
    address of lse and -delta of the tile's queries; bias: where its boxes are. masked: some query does not see some
    key."""
    lse_first = config.lse_first
    weight, _ = fragments.weights_at(config)
    boxes, half_of = bias_boxes.make(config, config.tile_m, True), elements.halves(config.dtype_of("bias"))

    def weights_of(first, end):
        @inlined
        def weigh(tile, lse_and_delta, bias, score, masked):
            acc_s, place = tile.acc_s, place_of_columns(lse_and_delta)
            four, biased = local.array(4, uint32), local.array(4, uint32)
            if config.bias_in_ds:
                first_row, lane = rows_of_lane()
                bias = boxes.place(bias, first_row, lane)
            for pair in range(first, end):
                if not lse_first:
                    ld_st.load_v4(four, 0, place + pair * 128)
                if config.bias_in_ds:
                    boxes.load(biased, bias, pair)
                for half in range(2):
                    n = 2 * pair + half
                    for r in range(2):
                        for x in range(2):
                            i = 4 * n + 2 * r + x
                            lse_log2 = float32(0) if lse_first else four[half * 2 + x].view(np.float32)
                            added = half_of(biased[2 * half + r], x) if config.bias_in_ds else float32(0)
                            p, _ = weight(acc_s[i], FragmentAt(float32(0), float32(0), added), score, lse_log2)
                            acc_s[i] = float32(0) if masked and not is_set(tile.mask_bits, r, n, x) else p

        @inlined
        def to_weights(tile, lse_and_delta, bias, score, masked):
            """acc_s <- P."""
            if masked:
                weigh(tile, lse_and_delta, bias, score, TRUE)
            else:
                weigh(tile, lse_and_delta, bias, score, FALSE)

        return to_weights

    # Where weights drop, mask_bits would take too many registers. P is 0 where a score is hidden.
    differentiate, differentiate_some = gradients(config, True), gradients(config, False, hidden_by_p=config.seeded)

    @inlined
    def to_gradients(tile, lse_and_delta, score, masked):
        """ds_frag <- dS in 16 bits, p_frag <- P. P is rounded only here, so that fewer registers are live at a time."""
        if masked:
            differentiate_some(tile, place_of_columns(lse_and_delta), score)
        else:
            differentiate(tile, place_of_columns(lse_and_delta), score)

    return named(weights_of, to_gradients)
