"""How the two consumers of the float32 backward on wgmma share a tile, in dK and dV and in dQ alike.

Both consumers process all 64 rows of the block, because the sums of both gradients and scores in parts do not fit in
the registers of one. The first computes S and P, and hands P times the derivative of the score to the second through
shared memory: the same thread of both has the same elements. The second computes dP and dS, and adds dS times the tile
a (Q or K) to dK or dQ. For dK and dV the first has sums, too: those of dV.

Products of one consumer run while the other works between its own:

    first   S(0)       dV(0)       S(1)       dV(1) ...      and for dQ   S(0)       S(1)         S(2) ...
    second       dP(0)       dK(0)      dP(1)       ...                        dP(0)      dQ(0) dP(1) ...

So P is computed during dP, and dS during dV or the next S.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32

from ...ptx import bar, ld_st, local
from ..score import fragments, reads
from ..score.stage import FragmentAt
from ..steps.basics import FALSE, TRUE, inlined, named
from ..steps.units import exponent_unit
from . import block, parts
from .backward_scores import is_set
from .block import CUT, FIRST_ROW, FREE, B, H, elected, own_thread, rows_in_warpgroup

FIRST, SECOND = (np.int32(i) for i in range(2))  # which consumer; not Python ints: see basics.py
WEIGHTS_STEP = 128 * 16  # bytes of four weights of every thread of a consumer


class Held(NamedTuple):
    """The registers of the first consumer's scores."""

    acc_s: Any  # float32 (other_rows / 8, 4)
    other: Any  # likewise, for the second panel
    mask_bits: Any
    distance: Any  # float32 (2,)
    loaded: Any  # (2, other_rows / 8, 2), of bias
    shown_bits: Any  # of the caller's mask


def make(config, tiles):
    """-> device functions of a consumer, and what they need as registers of what is read for the scores. tiles: of
    backward_tiles_float32.py."""
    has_second, plan, blocks = config.of_ds, config.shared_layout(), config.other_rows // 8
    to_parts = parts.to_operand(config.other_rows)

    word, mask_words = block.state_of(config).read, fragments.tile(config, 1, config.other_rows).mask_words
    find_visible = block.visibility(config, config.other_rows, block.state_of(config), rows_in_warpgroup)
    chain, (weight, _) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = reads.make(config, 1, config.other_rows, config.of_keys), config.has("mask")
    unit, inf, minus_inf = float32(exponent_unit(config)), float32(math.inf), float32(-math.inf)

    @inlined
    def weights_at(base):
        """Shared address of the thread's weights of a tile. Its next four are WEIGHTS_STEP bytes after these."""
        return int32(base + plan.weights + own_thread() * 16)

    @inlined
    def start(held):
        block.clear(held.mask_bits, mask_words)
        block.clear(held.distance, 2)

    @inlined
    def lse_of(lse, n, r, x):
        """lse of a column as the forward wrote it, -inf for a query without keys; lse of a row as lse_delta gives
        it."""
        if config.of_keys:
            found = lse[2 * n + x] * unit
            return inf if found == minus_inf else found
        return lse[r]

    @inlined
    def weigh(weights, held, lse, term, score, masked):
        """acc_s <- P; weights <- P times the derivative of the score, for the second consumer. masked, a constant: some
        row does not see some column."""
        four = local.array(4, uint32)
        for n in range(blocks):
            for r in range(2):
                for x in range(2):
                    at_x = 4 * n + 2 * r + x
                    away = cuda.fma(term, float32((r - n) * 8 - x), term * held.distance[0])
                    here = FragmentAt(away, read.added(held.loaded, r, n, x))
                    p, derivative = weight(held.acc_s[at_x], here, score, lse_of(lse, n, r, x))
                    given = p * derivative if config.derivative_varies else p
                    if masked:
                        seen = is_set(held.mask_bits, r, n, x)
                        p, given = p if seen else float32(0), given if seen else float32(0)
                    held.acc_s[at_x] = p
                    four[2 * r + x] = given.view(np.uint32)
            if has_second:
                ld_st.store_v4(weights + n * WEIGHTS_STEP, four, 0)

    @inlined
    def to_weights(base, step, weights, held, lse, arrays, strides, sizes, score):
        """The first consumer computes S of a tile, and P in its place. lse: that of the lane's columns or rows,
        whichever are queries."""
        n, i = step.n, step.i
        masked = i >= word(base, CUT) or i < word(base, FREE)
        term = float32(0)
        if chain.has_row_term:
            term = chain.row_term(word(base, B), word(base, H) + step.member, arrays, strides)
        if read.reads:
            first_row, lane = rows_in_warpgroup()
            head = int32(word(base, H) + step.member)
            origin = read.origin(word(base, B), head, word(base, FIRST_ROW), arrays, strides)
            read.load(held.loaded, held.shown_bits, i, origin, first_row, lane, arrays, strides, sizes, FALSE)
        tiles.a.wait(base, n)
        tiles.a.issue(held.acc_s, held.other, base, n)
        if chain.has_row_term or has_mask or masked:
            find_visible(base, i, sizes, held.mask_bits, held.distance)
        read.hide(held.mask_bits, held.shown_bits, TRUE)
        tiles.a.finish(held.acc_s, held.other, base, n)
        tiles.acquire_weights(base, n)
        if has_mask or masked:
            weigh(weights, held, lse, term, score, TRUE)
        else:
            weigh(weights, held, lse, term, score, FALSE)
        if has_second:
            bar.warp_sync()
            tiles.weights.producer_commit(base, step.n, elected())

    @inlined
    def to_score_gradients(base, step, weights, acc_dp, other, delta):
        """The second consumer computes dP of a tile, and dS in its place. delta: as lse."""
        four = local.array(4, uint32)
        n = step.n
        tiles.b.wait(base, n)
        tiles.b.issue(acc_dp, other, base, n)
        tiles.b.finish(acc_dp, other, base, n)
        tiles.weights.consumer_wait(base, n)
        for column in range(blocks):
            ld_st.load_v4(four, 0, weights + column * WEIGHTS_STEP)
            for r in range(2):
                for x in range(2):
                    at_x, p = 4 * column + 2 * r + x, four[2 * r + x].view(np.float32)
                    ds = p * (acc_dp[at_x] - delta[2 * column + x if config.of_keys else r])
                    acc_dp[at_x] = ds if p != float32(0) else float32(0)  # where P is 0, dP may be NaN
        bar.warp_sync()
        tiles.release_weights(base)

    def adder(me, kind):
        """-> add, a device function of consumer me: acc += scores times the tile a or b of this step."""

        @inlined
        def add(base, step, scores, acc, frag, even, odd):
            to_parts(scores, frag)
            if me == FIRST:  # for a, which the second adds, the first has waited before its weights
                tiles.b.wait(base, step.n)
            kind.issue_sums(even, odd, frag, base, step.n)
            kind.finish_sums(acc, even, odd, frag, base, step.n)

        return add

    words = dict(bias_words=read.bias_words, bias_type=read.bias_type, bits_words=read.bits_words)
    functions = start, weights_at, to_weights, to_score_gradients
    adders = dict(add_a=adder(SECOND, tiles.a), add_b=adder(FIRST, tiles.b))
    return named(*functions, **adders, **words, mask_words=mask_words)
