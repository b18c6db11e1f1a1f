"""P and dS of a tile in float32 gradients on Hopper, in the accumulators of two consumer warpgroups, and what they read
for it. One computes P, the other dS; the same thread of both has the same elements (backward_float32.py).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import ld_st, memory, special
from ..score import fragments
from ..score import reads as score_reads
from ..score.stage import FragmentAt, exponent_unit
from ..steps import lse_delta
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.plain import first_column_of, first_row_of
from . import backward_state
from .backward_state import BATCH, CUT, FIRST_ROW, FREE, HEAD, KEYS


class Weights(NamedTuple):
    """Device functions. i, member: which tile of the walk; base: the block's shared memory."""

    row_numbers: int  # of lse, and of delta: those of a lane's queries
    mask_words: int
    loaded_words: tuple[Any, ...]  # of what is read for each score: words of bias, of bits of a mask, type of the former
    own_thread: Callable[..., Any]  # () -> the thread in its warpgroup
    rows_of_lane: Callable[..., Any]  # () -> (the warp's first row in the own tile, lane)
    of_columns: Callable[..., Any]  # (found, values, base, i, member, sizes): numbers of queries that are columns
    of_rows: Callable[..., Any]  # (lse, delta, base, arrays, sizes): of queries that are rows
    term_of: Callable[..., Any]  # (base, member, arrays, strides) -> what all scores of a head share
    load: Callable[..., Any]  # (base, i, member, loaded, shown_bits, arrays, strides, sizes): what is read for each score
    find_visible: Callable[..., Any]  # (base, i, sizes, mask_bits, shown_bits, distance)
    to_weights: Callable[..., Any]  # (acc_s, base, i, lse, mask_bits, loaded, term, distance, score, weights): acc_s <- P
    to_score_gradients: Callable[..., Any]  # (acc_dp, delta, weights): acc_dp <- dS


def make(config, hands_over):
    """hands_over: P, times the derivative of the score, goes to the other consumer through shared memory."""
    of_keys, rows = config.of_keys, config.stream_rows
    blocks, varies = rows // 8, config.derivative_varies
    word, position = backward_state.words(config)[2:]
    mask_words, visible, _, _ = fragments.tile(config, 1, rows)
    chain, (weight, _) = fragments.chain(config), fragments.weights_at(config)
    read, has_mask = score_reads.make(config, 1, rows, of_keys), config.has("mask")
    reads, origin_of, load_reads, added, hide = read.reads, read.origin, read.load, read.added, read.hide
    row_term, has_row_term = chain.row_term, chain.has_row_term
    of_query, unit = lse_delta.of_query(config), float32(exponent_unit(config))
    inf, minus_inf = float32(math.inf), float32(-math.inf)

    @inlined
    def own_thread():
        return special.thread_index() & int32(127)

    @inlined
    def rows_of_lane():
        """Worked out anew each time: registers are dear."""
        thread = own_thread()
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def of_columns(found, values, base, i, member, sizes):
        """found (blocks, 2); 0 past the last query."""
        _, lane = rows_of_lane()
        first = int32(i * rows + first_column_of(lane))
        head = int64(word(base, BATCH)) * sizes.heads + word(base, HEAD) + member
        place = memory.address(values, head * sizes.seqlen_q + first)
        queries_left = int32(sizes.seqlen_q - first)
        for n in range(blocks):
            for x in range(2):
                here = uint32(1) if 8 * n + x < queries_left else uint32(0)
                found[2 * n + x] = memory.load_b32_if(place + 4 * (8 * n + x), here).view(np.float32)

    @inlined
    def of_rows(lse, delta, base, arrays, sizes):
        first_row, lane = rows_of_lane()
        for r in range(2):
            query = word(base, FIRST_ROW) + first_row + first_row_of(lane) + 8 * r
            lse[r], delta[r] = of_query(word(base, BATCH), word(base, HEAD), query, arrays, sizes)

    @inlined
    def term_of(base, member, arrays, strides):
        term = float32(0)
        if has_row_term:
            term = row_term(word(base, BATCH), word(base, HEAD) + member, arrays, strides)
        return term

    @inlined
    def load(base, i, member, loaded, shown_bits, arrays, strides, sizes):
        if reads:
            first_row, lane = rows_of_lane()
            head = int32(word(base, HEAD) + member)
            origin = origin_of(word(base, BATCH), head, word(base, FIRST_ROW), arrays, strides)
            load_reads(loaded, shown_bits, i, origin, first_row, lane, arrays, strides, sizes, FALSE)

    @inlined
    def has_hidden(base, i):
        """Whether some row does not see some column of tile i."""
        return i >= word(base, CUT) or i < word(base, FREE)

    @inlined
    def find_visible(base, i, sizes, mask_bits, shown_bits, distance):
        """mask_bits <- which of the lane's scores of tile i count; distance: q_pos - k_pos."""
        if has_row_term or has_mask or has_hidden(base, i):
            first_row, lane = rows_of_lane()
            if of_keys:  # seen from the keys, left and right change places
                left, right, end = sizes.right, sizes.left, sizes.seqlen_q
            else:
                left, right, end = sizes.left, sizes.right, int64(word(base, KEYS))
            visible(i, first_row, lane, position(base), left, right, end, mask_bits, distance)
        hide(mask_bits, shown_bits, TRUE)

    @inlined
    def lse_of(lse, n, r, x):
        """Of a column as the forward left it, where a query without keys has -inf; of a row as of_query gives it."""
        if of_keys:
            found = lse[2 * n + x] * unit
            return inf if found == minus_inf else found
        return lse[r]

    @inlined
    def weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, masked):
        """masked: a constant."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks):
            for r in range(2):
                for x in range(2):
                    at_x = 4 * n + 2 * r + x
                    away = distance[0] - float32((n - r) * 8 + x)
                    here = FragmentAt(term, away, added(loaded, r, n, x))
                    p, derivative = weight(acc_s[at_x], here, score, lse_of(lse, n, r, x))
                    given = p * derivative if varies else p
                    if masked:
                        seen = (mask_bits[r] >> uint32(2 * n + x)) & uint32(1) != 0
                        p, given = p if seen else float32(0), given if seen else float32(0)
                    acc_s[at_x] = p
                    four[2 * r + x] = given.view(np.uint32)
            if hands_over:
                ld_st.store_v4(weights + n * 2048, four, 0)

    @inlined
    def to_weights(acc_s, base, i, lse, mask_bits, loaded, term, distance, score, weights):
        if has_mask or has_hidden(base, i):
            weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, TRUE)
        else:
            weigh(acc_s, lse, mask_bits, loaded, term, distance, score, weights, FALSE)

    @inlined
    def to_score_gradients(acc_dp, delta, weights):
        """Where P is 0 dP may be NaN."""
        four = cuda.local.array(4, uint32)
        for n in range(blocks):
            ld_st.load_v4(four, 0, weights + n * 2048)
            for r in range(2):
                for x in range(2):
                    at_x = 4 * n + 2 * r + x
                    p = four[2 * r + x].view(np.float32)
                    ds = p * (acc_dp[at_x] - delta[2 * n + x if of_keys else r])
                    acc_dp[at_x] = ds if p != float32(0) else float32(0)

    return Weights(
        2 * blocks if of_keys else 2, mask_words, (read.bias_words, read.bits_words, read.bias_type), own_thread,
        rows_of_lane, of_columns, of_rows, term_of, load, find_visible, to_weights, to_score_gradients,
    )  # fmt: skip
