"""How a consumer of wgmma's backward computes P and dS from a tile of S and dP, if no option acts on single scores, but
for dropped weights, a mask and a bias in backward_fused.py. backward_scores.py is for all others, and has the same
three steps.

Rows of the tile are the block's own: queries, or keys with of_keys. Columns belong to the other side.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from ...ptx import cvt, ld_st, local, special
from ..score import fragments, reads
from ..score.stage import FragmentAt
from ..steps.inlined import FALSE, TRUE, inlined, nothing
from ..steps.named import named
from . import bias_boxes, block
from .block import rows_of_lane


class TileFragments(NamedTuple):
    """What a lane has of a tile of scores: local arrays."""

    acc_s: Any  # (columns / 8, 4): S, then P
    acc_dp: Any  # likewise dP
    p_frag: Any  # (columns / 8, 2): P in 16 bits
    ds_frag: Any  # likewise dS
    mask_bits: Any  # which scores count
    shown_bits: Any  # which of them the mask leaves
    kept: Any  # which weights count (kernels/score/dropout.py)
    loaded: Any  # the bias (2, columns / 8, 2), in 16 bits two in one (kernels/score/reads.py)
    distance: Any  # (2,) q_pos - k_pos
    owed: Any = None  # of a gradient of aux: as acc_s, where the derivative of the score is by the number of aux
    run: Any = None  # what is owed so far (kernels/score/aux_gradient.py)


@inlined
def is_set(bits, r, n, x):
    """Whether the bit of a lane's element is set: of its row r, and of its two in block n of 8 columns the x-th."""
    return (bits[r] >> uint32(2 * n + x)) & uint32(1) != 0


@inlined
def place_of_columns(lse_and_delta):
    """Where those of the lane's first columns are."""
    return lse_and_delta + ((special.thread_index() & int32(3)) << 4)


def make(config):
    """-> device functions, and `words` as in backward_scores.py. weights_of(first, end) makes one for those pairs of 8
    columns. lse, minus_delta: of keys, the shared address of lse and -delta of the tile's queries, for both; otherwise
    the lane's values for its two rows. masked: some row does not see some column."""
    pairs, varies, of_keys = config.stream_rows // 16, config.derivative_varies, config.of_keys
    of_ds, of_p = (config.of_dk, config.of_dv) if of_keys else (True, False)
    # Whether lse and -delta of the columns are in the accumulators already.
    lse_first, delta_first = (config.lse_first, config.delta_first) if of_keys else (False, False)
    drops = of_keys and config.seeded
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    weight, _ = fragments.weights_at(config)
    boxes, half_of = bias_boxes.make(config, config.tile_m, of_keys), reads.halves(config.dtype_of("bias"))
    has_row_term = fragments.chain(config).has_row_term
    find_visible = block.visibility(config, config.stream_rows, block.state_of(config))

    @inlined
    def prepare(base, step, tile, arrays, strides, sizes):
        """tile.mask_bits <- which scores count. -> `masked`"""
        if has_row_term or step.masked:
            find_visible(base, step.i, sizes, tile.mask_bits, tile.distance)
        return step.masked

    def weights_of(first, end):
        @inlined
        def weigh(tile, lse, bias, term, score, masked):
            acc_s, place = tile.acc_s, place_of_columns(lse) if of_keys else lse
            four, biased = local.array(4, uint32), local.array(4, uint32)
            p = local.array(2, float32)
            if config.bias_in_ds:
                first_row, lane = rows_of_lane()
                bias = boxes.place(bias, first_row, lane)
            for pair in range(first, end):
                if of_keys and not lse_first:
                    ld_st.load_v4(four, 0, place + pair * 128)
                if config.bias_in_ds:
                    boxes.load(biased, bias, pair)
                for half in range(2):
                    n = 2 * pair + half
                    for r in range(2):
                        for x in range(2):
                            i = 4 * n + 2 * r + x
                            if lse_first:
                                lse_log2 = float32(0)
                            else:
                                lse_log2 = four[half * 2 + x].view(np.float32) if of_keys else lse[r]
                            added = half_of(biased[2 * half + r], x) if config.bias_in_ds else float32(0)
                            here = FragmentAt(term, tile.distance[0] - float32((n - r) * 8 + x), added)
                            p[x], _ = weight(acc_s[i], here, score, lse_log2)
                            if masked and not is_set(tile.mask_bits, r, n, x):
                                p[x] = float32(0)
                            if not varies:
                                acc_s[i] = p[x]
                        if not of_ds:
                            tile.p_frag[2 * n + r] = pack(p[0], p[1])

        @inlined
        def to_some_weights(tile, lse, bias, term, score, masked):
            """acc_s <- P. Without dS, which needs it, also p_frag <- the same in 16 bits. bias: where its boxes are.

            If the score has a derivative that is not constant, acc_s keeps S, which is needed again.
            """
            if not (varies and of_ds):
                if masked:
                    weigh(tile, lse, bias, term, score, TRUE)
                else:
                    weigh(tile, lse, bias, term, score, FALSE)

        return to_some_weights

    to_all_weights = weights_of(0, pairs)

    @inlined
    def to_weights(base, step, tile, lse, bias, term, masked, arrays, strides, sizes, score):
        to_all_weights(tile, lse, bias, term, score, masked)

    @inlined
    def differentiate(tile, lse, minus_delta, term, score, masked):
        acc_s, acc_dp = tile.acc_s, tile.acc_dp
        four, lse_four = local.array(4, uint32), local.array(4, uint32)
        p, ds = local.array(2, float32), local.array(2, float32)
        place = place_of_columns(minus_delta) if of_keys else minus_delta
        for pair in range(pairs):
            if varies and of_keys:
                ld_st.load_v4(lse_four, 0, place + pair * 128)
            if of_keys and not delta_first:
                ld_st.load_v4(four, 0, place + pair * 128 + 64)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        if delta_first:
                            less = float32(0)
                        else:
                            less = four[half * 2 + x].view(np.float32) if of_keys else minus_delta[r]
                        if varies:
                            away = tile.distance[0] - float32((n - r) * 8 + x)
                            lse_log2 = lse_four[half * 2 + x].view(np.float32) if of_keys else lse[r]
                            here = FragmentAt(term, away, float32(0))
                            p[x], derivative = weight(acc_s[i], here, score, lse_log2)
                            ds[x] = p[x] * (acc_dp[i] + less) * derivative
                            if of_p and masked and not is_set(tile.mask_bits, r, n, x):
                                p[x] = float32(0)
                        elif drops:
                            counts = uint32(tile.kept[r] & uint32(1 << (2 * n + x))) != uint32(0)
                            dp = acc_dp[i] if counts else float32(0)
                            ds[x] = acc_s[i] * (dp * score.kept_count + less)
                            p[x] = acc_s[i] if counts else float32(0)
                        else:
                            p[x] = acc_s[i]
                            ds[x] = p[x] * (acc_dp[i] + less)
                        # Where weights drop, mask_bits would take too many registers; P is 0 where they hide a score.
                        if masked and (acc_s[i] == 0 if drops else not is_set(tile.mask_bits, r, n, x)):
                            ds[x] = float32(0)  # dP may be NaN there
                    if of_p:
                        tile.p_frag[2 * n + r] = pack(p[0], p[1])
                    tile.ds_frag[2 * n + r] = pack(ds[0], ds[1])

    @inlined
    def to_gradients(tile, lse, minus_delta, term, score, masked):
        """ds_frag <- dS in 16 bits, p_frag <- P. P is rounded only here, so that fewer registers are live at a time."""
        if masked:
            differentiate(tile, lse, minus_delta, term, score, TRUE)
        else:
            differentiate(tile, lse, minus_delta, term, score, FALSE)

    mask_words = fragments.tile(config, 1, config.stream_rows).mask_words
    return named(prepare, weights_of, to_weights, to_gradients, load_ahead=nothing, words=(mask_words, 1, 1, 1))
