"""Products of a consumer of wgmma's backward: of the block's own tiles with the tiles a and b that it loops over.

    S = own_a . a^T      dP = own_b . b^T      dK or dQ += dS . a      dV += P . b

A block that owns keys has K and V, and loops over Q and dO. One that owns queries has Q and dO, and loops over K and V.
backward_scores.py has what lies between the products.
"""

import numpy as np
from numba import float32, int32, uint32

from ...ptx import bar, fence, ld_st, local, wgmma
from ..steps.basics import inlined, named
from . import block, operands, pipeline
from .backward_scores import place_of_columns
from .operands import describe_rows


def zero_behind(config):
    """-> zero_behind(base, work, step), a device function of all consumers, of packed sequences: Q and dO of a query
    tile <- 0 behind the last query. There the next sequence begins, and 0 * NaN is NaN. Nobody reads them meanwhile:
    the consumers wait until all have S, and issue dP afterwards."""
    plan, rings, tile_m = config.shared_layout(), pipeline.of_backward(config), config.tile_m
    word = block.state_of(config).read
    zero_q = block.tail_zeroer(config, config.head_dim_padded, 4, tile_m)
    zero_do = block.tail_zeroer(config, config.head_dim_v_padded, 4, tile_m)

    @inlined
    def zero(base, work, step):
        n, queries_left = step.n, int32(word(work, block.QUERIES) - step.i * tile_m)
        if queries_left < tile_m:
            bar.sync(4, 128 * config.consumers)
            if config.of_dk:
                zero_q(base + plan.stream_a + rings.a.stage(n) * config.stream_a_bytes, queries_left)
            if config.of_dv:
                zero_do(base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes, queries_left)

    return zero


def make(config):
    """-> device functions of a consumer warpgroup. n: number of a tile among those that the block loads."""
    own_rows, tile_rows, plan = config.own_rows, config.other_rows, config.shared_layout()
    columns, rings = (config.head_dim_padded, config.head_dim_v_padded), pipeline.of_backward(config)
    multiply_s, multiply_dp = (operands.rows_by_rows(config, own_rows, tile_rows, count) for count in columns)
    add_a, add_b = (operands.fragment_by_tile(config, tile_rows, count) for count in columns)
    describe_columns = operands.describe_columns(tile_rows)
    # 1: the product is added to the accumulator's value
    to_lse, to_delta = int(config.lse_first), int(config.delta_first)
    read_by_lanes = pipeline.read_by_lanes(config)

    @inlined
    def a_at(base, n):
        return base + plan.stream_a + rings.a.stage(n) * config.stream_a_bytes

    @inlined
    def b_at(base, n):
        return base + plan.stream_b + rings.b.stage(n) * config.stream_b_bytes

    @inlined
    def lse_and_delta_at(base, n):
        """The shared address of lse and -delta of the n-th tile's queries."""
        return base + plan.lse_delta + rings.a.stage(n) * config.lse_delta_bytes

    @inlined
    def preload(acc, place, factor):
        """acc (tile_rows / 8, 4) <- factor * a number of each query; the columns are queries."""
        four = local.array(4, uint32)
        for pair in range(tile_rows // 16):
            ld_st.load_v4(four, 0, place + pair * 128)
            for half in range(2):
                for x in range(2):
                    start = factor * four[half * 2 + x].view(np.float32)
                    for r in range(2):
                        acc[4 * (2 * pair + half) + 2 * r + x] = start

    @inlined
    def preload_s(base, acc_s, n, lse_factor):
        """Waits for the n-th query tile; acc_s <- -lse / scale, to which S^T is added, so that P is 2^(scale_log2 *
        sum). The numbers are read during other products, and no exponential waits for them. lse_factor converts lse
        from powers of 2 to units of Q K^T, and is negative."""
        if config.lse_first:
            rings.a.consumer_wait(base, n)
            preload(acc_s, place_of_columns(lse_and_delta_at(base, n)), lse_factor)

    @inlined
    def preload_dp(base, acc_dp, n):
        """acc_dp <- -delta, to which dP^T is added."""
        if config.delta_first:
            preload(acc_dp, place_of_columns(lse_and_delta_at(base, n)) + 64, float32(1))

    @inlined
    def issue_s(base, acc_s, own_desc, n, none):
        """Issues S of the n-th tile a, once it has arrived. With `none` it issues own_a times own_b, whose result is
        not used: so consumers need no branch if no tile follows."""
        rings.a.consumer_wait(base, n)
        place = base + plan.own_b if none else a_at(base, n)
        multiply_s(acc_s, own_desc, describe_rows(place), to_lse)
        wgmma.commit_group()

    @inlined
    def issue_dp(base, acc_dp, own_desc, n):
        """Issues dP of the n-th tile b, which has arrived."""
        multiply_dp(acc_dp, own_desc, describe_rows(b_at(base, n)), to_delta)
        wgmma.commit_group()

    @inlined
    def issue_a(base, acc, ds_frag, n):
        """dK or dQ += dS times the n-th tile a."""
        add_a(acc, ds_frag, describe_columns(a_at(base, n)), 1)
        wgmma.commit_group()

    @inlined
    def issue_b(base, acc, p_frag, n):
        """dV += P^T times the n-th tile b, dO."""
        add_b(acc, p_frag, describe_columns(b_at(base, n)), 1)
        wgmma.commit_group()

    @inlined
    def release_a(base, n, elected):
        """Releases the n-th tile a for a warp. Ordinary loads read lse, delta and a bias beside it, and a bulk
        copy overwrites them: then every lane that has read them arrives."""
        if read_by_lanes:
            fence.proxy_async()
            rings.a.consumer_release(base, n, True)
        else:
            rings.a.consumer_release(base, n, elected)

    return named(lse_and_delta_at, preload_s, preload_dp, issue_s, issue_dp, issue_a, issue_b, release_a)
