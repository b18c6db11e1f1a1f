"""dS of one query row over a tile of keys: what dQ, dbias and the gradient of ALiBi's slopes are made of."""

from numba import cuda

from . import elements, rows, weights
from .inlined import inlined


def make(config, of_product):
    """-> (head, ds_row), device functions; head is that of steps.scores.

    of_product: dS is that of scale * q . k, which is behind the softcap; else that of the finished score.
    """
    tile_n, k_row, v_row = config.tile_n, config.k_row, config.v_row
    compute = elements.COMPUTE_TYPES[config.dtype]
    has_alibi, through_softcap = config.alibi_dtype is not None, config.softcap and of_product
    head, weight = weights.make(config)
    at_once = rows.at_once(tile_n, config.dtype)
    dot_k, dot_v = rows.dots(k_row, at_once, compute(0)), rows.dots(v_row, at_once, compute(0))

    @inlined
    def ds_row(
        q_smem, q_k, do_smem, do_k, k_smem, v_smem, ds_smem, ds_k, first_y, first_key, end_key, row_lse, row_delta,
        b, h, q_index, q_pos, bias, mask, alibi_slopes, bias_strides, mask_strides, alibi_strides, scale, softcap,
    ):  # fmt: skip
        """ds_smem[ds_k ...] (tile_n,) <- dS of the keys from first_y on, 0 outside of [first_key, end_key).

        Returns the sum of -dS * |q_pos - key|: the tile's share of the gradient of the slope.
        """
        s_part = cuda.local.array(at_once, compute)  # (at_once,)
        dp_part = cuda.local.array(at_once, compute)  # (at_once,)
        of_slope = compute(0)
        for y in range(0, tile_n, at_once):
            dot_k(s_part, q_smem, q_k, k_smem, y * k_row)  # S = Q K^T
            dot_v(dp_part, do_smem, do_k, v_smem, y * v_row)  # dP = dO V^T
            for u in range(at_once):
                k_index = first_y + y + u
                ds = compute(0)
                if first_key <= k_index and k_index < end_key:
                    p, through = weight(
                        s_part[u], row_lse, b, h, q_index, k_index, q_pos, bias, mask, alibi_slopes,
                        bias_strides, mask_strides, alibi_strides, scale, softcap,
                    )  # fmt: skip
                    if p != 0:  # else dP may be NaN or Inf, of a key that is not seen
                        ds = p * (dp_part[u] - row_delta)
                        if has_alibi:
                            of_slope -= ds * compute(abs(q_pos - k_index))
                        if through_softcap:
                            ds *= through
                ds_smem[ds_k + y + u] = ds
        return of_slope

    return head, ds_row
