"""How a consumer of wgmma/backward_fused computes P and dS from a tile of S and dP. Rows of the tile are the block's
own keys, and columns are queries. No option changes scores; weights may be dropped.

backward_scores.py, of the two other kernels, computes all of P before dP. Here half of P comes beside dP, and the
accumulators of S and dP may begin with -lse and -delta (backward_products.py)."""

import numpy as np
from numba import float32, int32, uint32

from ...ptx import cvt, ld_st, local, special
from ..score import fragments
from ..score.stage import FragmentAt
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.named import named


def make(config):
    """-> device functions. weights_of(first, end) makes one for those pairs of 8 columns. tile: TileFragments;
    lse_and_delta: the shared address of lse and -delta of the tile's queries. masked: some row does not see some
    column."""
    pairs, lse_first, delta_first = config.stream_rows // 16, config.lse_first, config.delta_first
    drops, words = config.seeded, -(-config.stream_rows // 128)
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    weight, _ = fragments.weights_at(config)

    @inlined
    def is_seen(mask_bits, r, n, x):
        return (mask_bits[r * words + n // 16] >> uint32(2 * (n % 16) + x)) & uint32(1) != 0

    @inlined
    def of_lane(lse_and_delta):
        """The place of the lane's first columns."""
        return lse_and_delta + ((special.thread_index() & int32(3)) << 4)

    def weights_of(first, end):
        @inlined
        def weigh(tile, lse_and_delta, score, masked):
            acc_s, place = tile.acc_s, of_lane(lse_and_delta)
            four = local.array(4, uint32)
            for pair in range(first, end):
                if not lse_first:
                    ld_st.load_v4(four, 0, place + pair * 128)
                for half in range(2):
                    n = 2 * pair + half
                    for r in range(2):
                        for x in range(2):
                            i = 4 * n + 2 * r + x
                            lse_log2 = float32(0) if lse_first else four[half * 2 + x].view(np.float32)
                            p, _ = weight(acc_s[i], FragmentAt(float32(0), float32(0), float32(0)), score, lse_log2)
                            acc_s[i] = float32(0) if masked and not is_seen(tile.mask_bits, r, n, x) else p

        @inlined
        def to_weights(tile, lse_and_delta, score, masked):
            """acc_s <- P."""
            if masked:
                weigh(tile, lse_and_delta, score, TRUE)
            else:
                weigh(tile, lse_and_delta, score, FALSE)

        return to_weights

    @inlined
    def differentiate(tile, lse_and_delta, score, masked):
        acc_s, acc_dp, place = tile.acc_s, tile.acc_dp, of_lane(lse_and_delta)
        four = local.array(4, uint32)
        p = local.array(2, float32)
        ds = local.array(2, float32)
        for pair in range(pairs):
            if not delta_first:
                ld_st.load_v4(four, 0, place + pair * 128 + 64)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        i = 4 * n + 2 * r + x
                        less = float32(0) if delta_first else four[half * 2 + x].view(np.float32)
                        if drops:
                            counts_here = uint32(tile.kept[r] & uint32(1 << (2 * n + x))) != uint32(0)
                            dp = acc_dp[i] if counts_here else float32(0)
                            ds[x] = acc_s[i] * (dp * score.kept_count + less)
                            p[x] = acc_s[i] if counts_here else float32(0)
                        else:
                            p[x] = acc_s[i]
                            ds[x] = p[x] * (acc_dp[i] + less)
                        # Where weights drop, mask_bits would take too many registers; P is 0 where they hide a score.
                        if masked and (acc_s[i] == 0 if drops else not is_seen(tile.mask_bits, r, n, x)):
                            ds[x] = float32(0)  # dP may be NaN there
                    tile.p_frag[2 * n + r] = pack(p[0], p[1])
                    tile.ds_frag[2 * n + r] = pack(ds[0], ds[1])

    @inlined
    def to_gradients(tile, lse_and_delta, score, masked):
        """ds_frag <- dS in 16 bits, p_frag <- P. P is rounded only here, so that fewer registers are live at a time."""
        if masked:
            differentiate(tile, lse_and_delta, score, TRUE)
        else:
            differentiate(tile, lse_and_delta, score, FALSE)

    return named(weights_of, to_gradients)
