"""How a consumer of wgmma/backward or wgmma/backward_fused computes P and dS from a tile of S and dP.

There are three steps. `prepare` runs during the product S and does all that needs no score: it finds the scores that
count (also by mask_mod, or its bits) and the dropped weights, and loads what is read for each. `to_weights` runs during
dP. It computes P, and stores P times the derivative of the score in the place of S, so no register holds a derivative
until dP is ready. `to_gradients` computes dS from both. If a warp sees a whole tile, the steps test no single scores.

Rows of the tile are the block's own: queries, or keys with of_keys. Columns belong to the other side.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from ...ptx import bits, cvt, ld_st, local, special, vote
from ..score import At, aux_gradient, fragments, gradient_functions, kept_weights, reads, user
from ..score.stage import FragmentAt
from ..steps import elements
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, named
from ..steps.repeated import repeated
from . import bias_boxes, block
from .block import FIRST_ROW, KEYS, POS_CUT, POS_FREE, QUERIES, B, H, rows_of_lane


class Place(NamedTuple):
    """The lane's first score: batch entry, head, query, key, and the position of query 0."""

    b: int
    h: int
    query: int
    key: int
    q_start: int


class TileFragments(NamedTuple):
    """A lane's part of a tile of scores, in local arrays."""

    acc_s: Any  # (columns / 8, 4): S, then P
    acc_dp: Any  # likewise dP
    p_frag: Any  # (columns / 8, 2): P in 16 bits
    ds_frag: Any  # likewise dS
    mask_bits: Any  # which scores count
    shown_bits: Any  # which of them the mask leaves
    kept: Any  # which weights count (kernels/score/kept_weights.py)
    loaded: Any  # the bias (2, columns / 8, 2), in 16 bits two in one (kernels/score/reads.py)
    distance: Any  # (2,) q_pos - k_pos
    daux: Any = None  # like acc_s, for a gradient of aux: derivatives of the scores by the number of aux
    run: Any = None  # the sums of daux so far (kernels/score/aux_gradient.py)


@inlined
def is_set(bits, r, n, x):
    """Whether the bit is set of the x-th of the lane's two elements in its row r and block n of 8 columns."""
    return (bits[r] >> uint32(2 * n + x)) & uint32(1) != 0


@inlined
def if_set(number, bits, r, n, x):
    """`number`, or 0 where is_set says no. It asks each time: of one answer for two numbers the compiler makes a shift
    for each bit, and ptxas no longer turns eight bits at a time into predicates."""
    return number if is_set(bits, r, n, x) else float32(0)


@inlined
def place_of_columns(lse_and_delta):
    """Where lse of the lane's first columns is."""
    return lse_and_delta + ((special.thread_index() & int32(3)) << 4)


def rounds_p_early(config):
    """Whether P is kept in 16 bits from the start: if dS is not P * (dP - delta), or without dS."""
    return config.of_p and (config.derivative_varies or not config.of_ds)


def gradients(config, inside):
    """-> of_tile(tile, minus_delta, score), a device function: ds_frag <- dS in 16 bits, p_frag <- P. minus_delta: with
    of_keys the lane's shared address. inside: all scores of the warp count."""
    of_keys, seeded, owes = config.of_keys, config.seeded, bool(config.wanted_aux)
    of_p, pairs = config.of_p and not rounds_p_early(config), config.other_rows // 16
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    aux = aux_gradient.make(config) if owes else None
    has_delta, loads = not config.delta_first, of_keys and not config.delta_first

    @inlined
    def of_tile(tile, minus_delta, score):
        acc_s, acc_dp, four = tile.acc_s, tile.acc_dp, local.array(4, uint32)
        p, ds = local.array(2, float32), local.array(2, float32)
        for pair in range(pairs):
            if loads:
                ld_st.load_v4(four, 0, minus_delta + pair * 128 + 64)
            for half in range(2):
                n = 2 * pair + half
                for r in range(2):
                    for x in range(2):
                        at, less = 4 * n + 2 * r + x, float32(0)
                        if has_delta:
                            less = four[half * 2 + x].view(np.float32) if of_keys else minus_delta[r]
                        dp = if_set(acc_dp[at], tile.kept, r, n, x) if seeded else acc_dp[at]
                        factor = dp * score.kept_count + less if seeded else dp + less
                        ds[x] = acc_s[at] * factor
                        if owes:
                            aux.add_same(tile.run, tile.daux[at], factor)
                        if of_p:
                            p[x] = if_set(acc_s[at], tile.kept, r, n, x) if seeded else acc_s[at]
                        # Hidden: dP may be NaN. If weights drop, mask_bits would take too many registers.
                        if not inside and (acc_s[at] == 0 if seeded else not is_set(tile.mask_bits, r, n, x)):
                            ds[x] = float32(0)
                    if of_p:
                        tile.p_frag[2 * n + r] = pack(p[0], p[1])
                    tile.ds_frag[2 * n + r] = pack(ds[0], ds[1])

    return of_tile


def make(config):
    """-> device functions, and the numbers of words of TileFragments' mask_bits, shown_bits, kept and loaded. step: a
    TileStep (backward.py); tile: TileFragments. lse, minus_delta: with of_keys, the shared address of both
    for the tile's columns; otherwise the lane's values for its two rows. bias: the shared address of the tile's boxes.
    every: all scores of the warp count."""
    pairs, of_keys = config.other_rows // 16, config.of_keys
    way = 1 if of_keys else -1  # 1 if columns are queries
    of_ds, early, lse_first = config.of_ds, rounds_p_early(config), config.lse_first
    loads_lse = of_keys and not lse_first
    has_score_mod, has_mask, mod_bits = config.has("score_mod"), config.has("mask"), config.mask_mod_as_bits
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    word, position = block.state_of(config).read, block.state_of(config).position
    score_tile = fragments.tile(config, 1, config.other_rows)
    bits_words, visible = score_tile.mask_words, score_tile.visible
    weight, _ = fragments.weights_at(config)
    read = reads.make(config, 1, config.other_rows, of_keys)
    boxes, half_of = bias_boxes.make(config, config.tile_m, of_keys), elements.halves(config.dtype_of("bias"))
    count = kept_weights.on_fragments(config, 1, config.other_rows)
    owes = bool(config.wanted_aux)  # also a gradient of aux, of one number for a head
    ask = user.recorded(config) if owes else None
    asked, calls_mask_mod = user.present(config), user.calls_mask_mod(config)
    ask_mask_mod = gradient_functions.of_bits(config, config.other_rows, of_keys)
    with_slope = user.make(config, "score_mod", of_ds) if has_score_mod else None
    has_row_term, every_bit = fragments.chain(config).has_row_term, uint32((1 << (4 * pairs)) - 1)

    @inlined
    def place_of(base, i, member):
        first_row, lane = rows_of_lane()
        row = int32(word(base, FIRST_ROW) + first_row + first_row_of(lane))
        column = int32(i * config.other_rows + first_column_of(lane))
        if of_keys:  # position: of the first key among the queries
            q_start, query, key = word(base, FIRST_ROW) - position(base), column, row
        else:
            q_start, query, key = position(base) - word(base, FIRST_ROW), row, column
        return Place(word(base, B), int32(word(base, H) + member), query, key, q_start)

    @inlined
    def load_ahead(base, i, member, asks, tile, arrays, strides, sizes):
        """Issues loads of what a mask_mod leaves of tile i, which comes next, beside products of the one before."""
        if mod_bits:
            if asks:
                first_row, lane = rows_of_lane()
                h = int32(word(base, H) + member)
                origin = read.origin(word(base, B), h, word(base, FIRST_ROW), arrays, strides)
                read.load_bits(tile.shown_bits, i, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def find_element(base, step, tile, arrays, strides, sizes):
        """tile.run.place <- which number of aux the head's scores read: the function says it for one that counts."""
        words = tile.mask_bits[0] & every_bit, tile.mask_bits[1] & every_bit
        seen, place = words[0] if words[0] != 0 else words[1], place_of(base, step.i, step.member)
        if seen != 0 and tile.run.place[0] < 0:
            bit = int32(bits.highest(seen))
            query = int32(place.query if words[0] != 0 else place.query + 8)
            key = int32(place.key + (bit >> 1) * 8 + (bit & 1))
            q_pos = place.q_start + query
            at = At(place.b, place.h, query, key, q_pos, q_pos - key)
            _, _, element, _ = ask(float32(0), at, int64(0), arrays, strides, sizes)
            tile.run.place[0] = int32(element)

    @inlined
    def prepare(base, step, tile, arrays, strides, sizes):
        """tile <- all that needs no score. -> `every`"""
        i, member, masked = step.i, step.member, step.masked
        first_row, lane = rows_of_lane()
        own_first = word(base, FIRST_ROW)
        if read.reads:
            origin = read.origin(word(base, B), int32(word(base, H) + member), own_first, arrays, strides)
            read.load_bias(tile.loaded, i, origin, first_row, lane, strides, sizes, FALSE)
            if masked and not mod_bits:  # else `load_ahead` has loaded them
                read.load_bits(tile.shown_bits, i, origin, first_row, lane, arrays, strides, sizes)
        keys, queries = word(base, KEYS), word(base, QUERIES) if config.packed else sizes.seqlen_q
        if of_keys:  # seen from the keys, left and right are exchanged
            left, right, column_end, row_end = sizes.right, sizes.left, queries, keys
        else:
            left, right, column_end, row_end = sizes.left, sizes.right, keys, queries
        cut = masked
        if has_mask and masked:
            cut = i >= word(base, POS_CUT) or i < word(base, POS_FREE)
        if cut or has_row_term:
            visible(i, first_row, lane, position(base), left, right, column_end, tile.mask_bits, tile.distance)
        else:
            for r in range(2):
                tile.mask_bits[r] = every_bit
        if count.present:
            place = place_of(base, i, member)
            if of_keys:
                count.of_keys(tile.kept, place.query + place.q_start, place.b, place.h, place.key, arrays, sizes)
            else:
                lane_row, tile_pos = int32(first_row + first_row_of(lane)), position(base)
                count.of_queries(tile.kept, place.key, place.b, place.h, lane_row, tile_pos, arrays, sizes)
        if step.asks if mod_bits else masked:
            read.hide(tile.mask_bits, tile.shown_bits, TRUE)
        if asked:  # no function is called for a row that does not exist
            for r in range(2):
                if own_first + first_row + first_row_of(lane) + 8 * r >= row_end:
                    tile.mask_bits[r] = uint32(0)
        if calls_mask_mod:
            if step.asks:
                b, h, query, key, q_start = place_of(base, i, member)
                ask_mask_mod(tile.mask_bits, b, h, query, q_start, key, arrays, strides)
        if owes:
            find_element(base, step, tile, arrays, strides, sizes)
        # Bits past the tile may also be set.
        return vote.any_lane(~(tile.mask_bits[0] & tile.mask_bits[1]) & every_bit) == 0

    def one_pair(inside: bool) -> Any:
        """-> a function for the n-th pair of 8 columns from `first` on. inside: all scores count; no branch surrounds a
        score, so the pairs are computed side by side."""

        @inlined
        def of_pair(n, first, tile, lse, bias, term, place, arrays, strides, sizes, score):
            acc_s, pair = tile.acc_s, int32(first + n)
            four = local.array(4, uint32)
            p = local.array(4, float32)
            biased = local.array(4, uint32)
            if loads_lse:
                ld_st.load_v4(four, 0, lse + pair * 128)
            if boxes.present:
                boxes.load(biased, bias, pair)
            for half in range(2):
                n = 2 * pair + half
                # The inner loop goes over rows: with columns inside, the compiler would keep the positions of all
                # columns.
                for x in range(2):
                    column = int32(n * 8 + x)
                    for r in range(2):
                        at, seen = 4 * n + 2 * r + x, inside or is_set(tile.mask_bits, r, n, x)
                        s, slope, by_aux = acc_s[at], float32(1), float32(0)
                        if has_score_mod:
                            if seen:
                                query = int32(place.query + (column if of_keys else r * 8))
                                key = int32(place.key + (r * 8 if of_keys else column))
                                ahead = place.q_start + place.query - place.key + way * (column - r * 8)
                                here = At(place.b, place.h, query, key, place.q_start + query, ahead)
                                s *= score.scale
                                if owes:  # by dual numbers twice: of aux, and of the score
                                    _, slope = with_slope(s, here, arrays, strides)
                                    s, by_aux, _, _ = ask(s, here, int64(0), arrays, strides, sizes)
                                elif of_ds:
                                    s, slope = with_slope(s, here, arrays, strides)
                                else:
                                    s = with_slope(s, here, arrays, strides)
                        if lse_first:
                            row_lse = float32(0)
                        else:
                            row_lse = four[half * 2 + x].view(np.float32) if of_keys else lse[r]
                        own_bias = (
                            half_of(biased[2 * half + r], x) if boxes.present else read.added(tile.loaded, r, n, x)
                        )
                        away = cuda.fma(term, float32(8 * r - column), term * tile.distance[0])
                        fragment = FragmentAt(away, own_bias)
                        weighed, derivative = weight(s, fragment, score, row_lse)
                        weighed = weighed if seen else float32(0)
                        acc_s[at] = weighed * derivative * slope if seen else float32(0)
                        if owes:
                            tile.daux[at] = weighed * derivative * by_aux if seen else float32(0)
                        if early:
                            p[2 * r + x] = if_set(weighed, tile.kept, r, n, x) if count.present else weighed
                if early:
                    for r in range(2):
                        tile.p_frag[2 * n + r] = pack(p[2 * r], p[2 * r + 1])

        return of_pair

    of_pair, of_pair_inside = one_pair(False), one_pair(True)

    def weights_of(first, end):
        """-> to_weights, a device function for these pairs of 8 columns."""
        every_pair, every_pair_inside = repeated(of_pair, end - first), repeated(of_pair_inside, end - first)

        @inlined
        def to_weights(base, step, tile, lse, bias, term, every, arrays, strides, sizes, score):
            """acc_s <- P times the derivative of the score; p_frag <- P where it counts. to_gradients may write p_frag
            instead, so that fewer registers are live beside dP."""
            place = place_of(base, step.i, step.member) if has_score_mod else None
            if of_keys:
                lse = place_of_columns(lse)
            if boxes.present:
                first_row, lane = rows_of_lane()
                bias = boxes.place(bias, first_row, lane)
            if every:
                every_pair_inside(int32(first), tile, lse, bias, term, place, arrays, strides, sizes, score)
            else:
                every_pair(int32(first), tile, lse, bias, term, place, arrays, strides, sizes, score)

        return to_weights

    differentiate, differentiate_some = gradients(config, True), gradients(config, False)

    @inlined
    def to_gradients(tile, minus_delta, score, every):
        """ds_frag <- dS in 16 bits, p_frag <- P."""
        if of_keys:
            minus_delta = place_of_columns(minus_delta)
        if every:
            differentiate(tile, minus_delta, score)
        else:
            differentiate_some(tile, minus_delta, score)

    words = (bits_words, read.bits_words, count.words, read.bias_words)
    return named(load_ahead, prepare, weights_of, to_gradients, words=words)
