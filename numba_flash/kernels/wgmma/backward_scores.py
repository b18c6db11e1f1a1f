"""How a consumer of wgmma's backward computes P and dS from a tile of S and dP, if a caller's functions, a bias, a mask
or dropped weights act on single scores.

There are three steps. `prepare` runs during the product S and does all that needs no score: it finds the scores that
count (also by mask_mod) and the dropped weights, and loads what is read for each. `to_weights` runs during dP. It
computes P, and stores P times the derivative of the score in the place of S, so no register holds a derivative until dP
is ready. `to_gradients` computes dS from both. If a warp sees a whole tile, the steps do not test single scores.

Rows of the tile are the block's own: queries, or keys with of_keys. Columns belong to the other side.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, int32, uint32

from ...ptx import cvt, ld_st, local, special, vote
from ..score import At, counts, fragments, gradient_functions, user
from ..score import reads as score_reads
from ..score.stage import FragmentAt
from ..steps.inlined import FALSE, TRUE, inlined
from ..steps.plain import first_column_of, first_row_of
from ..steps.repeated import repeated
from . import backward_state, bias_boxes
from .backward_state import BATCH, FIRST_ROW, HEAD, KEYS, POS_CUT, POS_FREE


class Place(NamedTuple):
    """The lane's first score: batch entry, head, query, key, and the position of query 0."""

    b: int
    h: int
    query: int
    key: int
    q_start: int


class Own(NamedTuple):
    """What a lane keeps of the scores of a tile."""

    bits: Any  # which scores count
    shown: Any  # which the mask shows
    kept: Any  # which weights count (kernels/score/counts.py)
    loaded: Any  # bias (kernels/score/reads.py)


class TileScores(NamedTuple):
    """Device functions, and the numbers of words of Own. lse, minus_delta: with of_keys, the shared address of both for
    the tile's columns; otherwise the lane's values for its two rows. bias: the shared address of the tile's boxes."""

    words: tuple[int, int, int, int]
    prepare: Callable[..., Any]
    to_weights: Callable[..., Any]
    to_gradients: Callable[..., Any]


def make(config, of_keys):
    pairs, way = config.stream_rows // 16, 1 if of_keys else -1  # way: 1 if columns are queries
    of_ds, of_p = (config.of_dk, config.of_dv) if of_keys else (True, False)
    has_score_mod, has_mask_mod, has_mask = config.has("score_mod"), config.has("mask_mod"), config.has("mask")
    # P is kept in 16 bits if dS is not P * (dP - delta). Without dS it can be rounded at once.
    early = of_p and (config.derivative_varies or not of_ds)

    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    _, _, _, word, position = backward_state.make(config)
    bits_words, visible, _, _ = fragments.tile(config, 1, config.stream_rows)
    weight, _ = fragments.weights_at(config)
    read = score_reads.make(config, 1, config.stream_rows, of_keys)
    boxes, half_of = bias_boxes.make(config, config.tile_m, of_keys), score_reads.halves(config.dtype_of("bias"))
    boxed, place_of_bias, load_boxed = boxes.present, boxes.place, boxes.load
    count = counts.on_fragments(config, 1, config.stream_rows)
    asked = user.present(config)
    ask_mask_mod = gradient_functions.of_bits(config, config.stream_rows, of_keys)
    with_slope = user.make(config, "score_mod", of_ds) if has_score_mod else None
    has_row_term, every_bit = fragments.chain(config).has_row_term, uint32((1 << (4 * pairs)) - 1)

    @inlined
    def rows_of_lane():
        """-> (the warp's first row in the block's own tile, lane). Computed again on each call, to save registers."""
        thread = special.thread_index() - 128
        return (thread >> int32(5)) * 16, thread & int32(31)

    @inlined
    def head_of(base, member):
        return int32(word(base, HEAD) + member) if of_keys else word(base, HEAD)

    @inlined
    def place_of(base, i, member):
        first_row, lane = rows_of_lane()
        row = int32(word(base, FIRST_ROW) + first_row + first_row_of(lane))
        column = int32(i * config.stream_rows + first_column_of(lane))
        if of_keys:  # position: of the first key among the queries
            q_start = word(base, FIRST_ROW) - position(base)
            place = Place(word(base, BATCH), head_of(base, member), column, row, q_start)
        else:
            q_start = position(base) - word(base, FIRST_ROW)
            place = Place(word(base, BATCH), head_of(base, member), row, column, q_start)
        return place

    @inlined
    def prepare(base, i, member, own, distance, masked, asks, arrays, strides, sizes):
        """own, distance <- all of tile i that needs no score. masked: some rows do not see all of it, or a mask hides
        some of it; asks: mask_mod removes some of it. -> whether all scores of the warp count."""
        first_row, lane = rows_of_lane()
        own_first = word(base, FIRST_ROW)
        if read.reads:
            origin = read.origin(word(base, BATCH), head_of(base, member), own_first, arrays, strides)
            read.load_bias(own.loaded, i, origin, first_row, lane, strides, sizes, FALSE)
            if masked:
                read.load_bits(own.shown, i, origin, first_row, lane, arrays, strides, sizes)
        keys = word(base, KEYS)
        if of_keys:  # seen from the keys, left and right are exchanged
            left, right, column_end, row_end = sizes.right, sizes.left, sizes.seqlen_q, keys
        else:
            left, right, column_end, row_end = sizes.left, sizes.right, keys, sizes.seqlen_q
        cut = masked
        if has_mask and masked:
            cut = i >= word(base, POS_CUT) or i < word(base, POS_FREE)
        if cut or has_row_term:
            visible(i, first_row, lane, position(base), left, right, column_end, own.bits, distance)
        else:
            for r in range(2):
                own.bits[r] = every_bit
        if count.present:
            place = place_of(base, i, member)
            if of_keys:
                count.of_keys(own.kept, place.query + place.q_start, place.b, place.h, place.key, arrays, sizes)
            else:
                lane_row, tile_pos = int32(first_row + first_row_of(lane)), position(base)
                count.of_queries(own.kept, place.key, place.b, place.h, lane_row, tile_pos, arrays, sizes)
        if masked:
            read.hide(own.bits, own.shown, TRUE)
        if asked:  # no function is called for a row that does not exist
            for r in range(2):
                if own_first + first_row + first_row_of(lane) + 8 * r >= row_end:
                    own.bits[r] = uint32(0)
        if has_mask_mod:
            if asks:
                b, h, query, key, q_start = place_of(base, i, member)
                ask_mask_mod(own.bits, b, h, query, q_start, key, arrays, strides)
        # Bits past the tile may also be set.
        return vote.any_lane(~(own.bits[0] & own.bits[1]) & every_bit) == 0

    @inlined
    def is_seen(own, r, n, x):
        return (own.bits[r] >> uint32(2 * n + x)) & uint32(1) != 0

    @inlined
    def if_kept(number, own, r, n, x):
        """`number`, or 0 if the weight does not count."""
        if count.present:
            number = number if (own.kept[r] >> uint32(2 * n + x)) & uint32(1) != 0 else float32(0)
        return number

    def one_pair(inside: bool) -> Any:
        """-> a function for one pair of 8 columns. inside: all scores count; no branch surrounds a score, so the pairs
        are computed side by side."""

        @inlined
        def of_pair(pair, acc_s, p_frag, lse, bias, own, term, distance, place, arrays, strides, score):
            four = local.array(4, uint32)
            p = local.array(4, float32)
            biased = local.array(4, uint32)
            if of_keys:
                ld_st.load_v4(four, 0, lse + pair * 128)
            if boxed:
                load_boxed(biased, bias, pair)
            for half in range(2):
                n = 2 * pair + half
                # The inner loop goes over rows: with columns inside, the compiler would keep the positions of all
                # columns.
                for x in range(2):
                    column = int32(n * 8 + x)
                    for r in range(2):
                        at, seen = 4 * n + 2 * r + x, inside or is_seen(own, r, n, x)
                        s, slope = acc_s[at], float32(1)
                        if has_score_mod:
                            if seen:
                                query = int32(place.query + (column if of_keys else r * 8))
                                key = int32(place.key + (r * 8 if of_keys else column))
                                ahead = place.q_start + place.query - place.key + way * (column - r * 8)
                                here = At(place.b, place.h, query, key, place.q_start + query, ahead)
                                s *= score.scale
                                if of_ds:
                                    s, slope = with_slope(s, here, arrays, strides)
                                else:
                                    s = with_slope(s, here, arrays, strides)
                        row_lse = four[half * 2 + x].view(np.float32) if of_keys else lse[r]
                        own_bias = half_of(biased[2 * half + r], x) if boxed else read.added(own.loaded, r, n, x)
                        fragment = FragmentAt(term, distance[0] - float32(column - 8 * r), own_bias)
                        weighed, derivative = weight(s, fragment, score, row_lse)
                        weighed = weighed if seen else float32(0)
                        acc_s[at] = weighed * derivative * slope if seen else float32(0)
                        if early:
                            p[2 * r + x] = if_kept(weighed, own, r, n, x)
                if early:
                    for r in range(2):
                        p_frag[2 * n + r] = pack(p[2 * r], p[2 * r + 1])

        return of_pair

    every_pair, every_pair_inside = (repeated(one_pair(inside), pairs) for inside in (False, True))

    @inlined
    def to_weights(base, i, member, acc_s, p_frag, lse, bias, own, term, distance, every, arrays, strides, score):
        """acc_s <- P times the derivative of the score; p_frag <- P where it counts. to_gradients may write p_frag
        instead, so that fewer registers are live beside dP. every: all scores of the warp count."""
        place = place_of(base, i, member)
        if of_keys:
            lse = lse + ((special.thread_index() & int32(3)) << 4)
        if boxed:
            first_row, lane = rows_of_lane()
            bias = place_of_bias(bias, first_row, lane)
        if every:
            every_pair_inside(acc_s, p_frag, lse, bias, own, term, distance, place, arrays, strides, score)
        else:
            every_pair(acc_s, p_frag, lse, bias, own, term, distance, place, arrays, strides, score)

    def gradients(inside):
        @inlined
        def of_tile(acc_s, acc_dp, p_frag, ds_frag, minus_delta, own, score):
            four = local.array(4, uint32)
            ds = local.array(2, float32)
            p = local.array(2, float32)
            for pair in range(pairs):
                if of_keys:
                    ld_st.load_v4(four, 0, minus_delta + pair * 128 + 64)
                for half in range(2):
                    n = 2 * pair + half
                    for r in range(2):
                        for x in range(2):
                            at = 4 * n + 2 * r + x
                            less = four[half * 2 + x].view(np.float32) if of_keys else minus_delta[r]
                            dp = if_kept(acc_dp[at], own, r, n, x)
                            ds[x] = acc_s[at] * (dp * score.kept_count + less if count.present else dp + less)
                            if not (inside or is_seen(own, r, n, x)):
                                ds[x] = float32(0)  # dP may be NaN there
                            if of_p and not early:
                                p[x] = if_kept(acc_s[at], own, r, n, x)
                        if of_p and not early:
                            p_frag[2 * n + r] = pack(p[0], p[1])
                        ds_frag[2 * n + r] = pack(ds[0], ds[1])

        return of_tile

    gradients_inside, gradients_of_some = gradients(True), gradients(False)

    @inlined
    def to_gradients(acc_s, acc_dp, p_frag, ds_frag, minus_delta, own, every, score):
        """ds_frag <- dS in 16 bits, p_frag <- P. every: all scores of the warp count."""
        if of_keys:
            minus_delta = minus_delta + ((special.thread_index() & int32(3)) << 4)
        if every:
            gradients_inside(acc_s, acc_dp, p_frag, ds_frag, minus_delta, own, score)
        else:
            gradients_of_some(acc_s, acc_dp, p_frag, ds_frag, minus_delta, own, score)

    words = (bits_words, read.bits_words, count.words, read.bias_words)
    return TileScores(words, prepare, to_weights, to_gradients)
