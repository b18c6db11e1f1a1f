"""The options between S and the softmax, for a consumer and a key tile: masks, biases, ALiBi, dropout and the caller's
functions. Without its option a device function leaves no code.

For each key tile a consumer calls `load` before it issues S. While S is computed it calls `find_bits`, `find_kept`,
which need no score, and `load_ahead` for the next tile. `finish` changes S, and `drop` changes P.
"""

from typing import Any, NamedTuple

from numba import float32, int32, uint32

from ...ptx import fence, local
from ..score import fragment_functions, fragments, kept_weights, reads
from ..steps.basics import FALSE, TRUE, first_column_of, first_row_of, inlined, named
from ..steps.sequence import queries as make_queries
from ..steps.units import LOG2_E
from . import bias_boxes, block, pipeline
from .block import FIRST_ROW, POS_CUT, POS_FREE, B, H, position, rows_of_lane, tile_of, word


class KeyTile(NamedTuple):
    """A tile of tile_n keys, for the query tile at work."""

    j: Any  # its number in the sequence: its first key is j * tile_n
    n: Any  # its number among all key tiles that the block has loaded
    work_tile: Any  # the shared address of the query tile's words (block.py)
    inside: Any  # a constant: every row sees every key, but for those that mask_mod removes
    masked: Any  # if not inside: whether some row may not see some key
    asks: Any  # whether mask_mod removes something of the tile


class ScoreRegisters(NamedTuple):
    """Local arrays of a lane, which has two rows of a tile."""

    acc_s: Any  # (tile_n / 8, 4): S, then P
    loaded: Any  # the bias (2, tile_n / 8, 2), in 16 bits two in one
    mask_bits: Any  # which scores count: a word for each row and 16 blocks of 8 keys, a bit for each score
    shown_bits: Any  # which ones the caller's mask leaves, likewise
    terms: Any  # (2,) ALiBi's slopes of the rows' heads
    distance: Any  # (2,) q_pos - k_pos of the rows and the lane's first key


class ConsumerRegisters(NamedTuple):
    """Local arrays of a lane of the forward."""

    scores: ScoreRegisters
    acc_o: Any  # (head_dim_v_padded / 8, 4): O before it is divided by l
    p_frag: Any  # (tile_n / 8, 2): P in 16 bits, two in one; in float32 for each part
    m: Any  # (2,) the rows' running maxima, in log2
    l: Any  # (2,) the lane's share of the rows' sums
    alpha: Any  # (2,) the factors of O and l after a tile
    kept: Any  # which weights dropout keeps, in the order of mask_bits


def dropout(config):
    """-> device functions of dropout in tiles of config.tile_n keys, and `words`, the length of `kept`."""
    count = kept_weights.on_fragments(config, 1, config.tile_n)

    @inlined
    def find_kept(tile, kept, arrays, sizes):
        """kept <- which weights of a KeyTile count."""
        if count.present:
            (first_row, lane), work_tile = rows_of_lane(), tile.work_tile
            b, h, lane_row = word(work_tile, B), word(work_tile, H), first_row + first_row_of(lane)
            first_key = int32(tile.j * config.tile_n + first_column_of(lane))
            count.of_queries(kept, first_key, b, h, lane_row, position(work_tile), arrays, sizes)

    @inlined
    def drop(acc_s, kept):
        """acc_s: weights <- 0 where they do not count."""
        if count.present:
            count.drop(acc_s, kept)

    @inlined
    def scale_kept(inverse_l, score):
        """inverse_l (2,) <- that times 1 / (1 - dropout_p)."""
        if count.present:
            count.scale(inverse_l, score)

    return named(find_kept, drop, scale_kept, words=count.words)


def make(config):
    """-> device functions, and the numbers of words of a lane's mask_bits, shown_bits, kept and loaded. tile: a
    KeyTile; scores: ScoreRegisters."""
    queries, queries_of = config.queries, make_queries(config)
    read, kept_weights = reads.make(config, 1), dropout(config)
    hide, some_hidden, has_mask, mod_bits = read.hide, read.some_hidden, config.has("mask"), config.mask_mod_as_bits
    chain, score_tile = fragments.chain(config), fragments.tile(config, 1)
    find_visible = block.visibility(config, config.tile_n)
    boxes, blocks, consumers = bias_boxes.make(config, 64), config.tile_n // 8, config.consumers
    bias_at, bias_bytes = config.shared_layout().bias, config.bias_bytes
    ring = pipeline.of_forward(config).bias
    functions, has_score_mod = fragment_functions.make(config), config.has("score_mod")
    log2_e = float32(LOG2_E)

    @inlined
    def begin(scores, work_tile, arrays, strides):
        """terms and mask_bits <- their values at the beginning of a query tile."""
        for r in range(2):
            scores.terms[r] = float32(0)
            if chain.has_row_term:
                first_row, lane = rows_of_lane()
                row_head = word(work_tile, H) + (first_row + first_row_of(lane) + 8 * r) % config.group_size
                scores.terms[r] = chain.row_term(word(work_tile, B), row_head, arrays, strides)
        block.clear(scores.mask_bits, score_tile.mask_words)

    @inlined
    def find_bits(tile, scores, sizes):
        """mask_bits <- which scores count, if some may not; distance, if an option reads it."""
        j, work_tile, mask_bits, distance = tile.j, tile.work_tile, scores.mask_bits, scores.distance
        # If every row sees every key, only a mask_mod hides scores: mask_bits are its bits.
        alone = tile.inside and mod_bits and not config.scores_finished
        bits, asks = scores.shown_bits, tile.asks
        if has_mask and not tile.inside:
            # Positions hide something only in some of the tiles for which the mask is read.
            if word(work_tile, POS_FREE) <= j < word(work_tile, POS_CUT):
                if chain.has_row_term:
                    find_visible(work_tile, j, sizes, mask_bits, distance)  # needed for the distance
                hide(mask_bits, bits, FALSE)
            else:
                find_visible(work_tile, j, sizes, mask_bits, distance)
                hide(mask_bits, bits, TRUE)
        elif not alone and (config.scores_finished or has_score_mod or tile.masked or asks):
            find_visible(work_tile, j, sizes, mask_bits, distance)
        if mod_bits:
            if asks:
                hide(mask_bits, bits, FALSE if alone else TRUE)

    @inlined
    def origin_of(work_tile, arrays, strides):
        return read.origin(word(work_tile, B), word(work_tile, H), word(work_tile, FIRST_ROW), arrays, strides)

    @inlined
    def load(tile, scores, arrays, strides, sizes):
        """Issues loads of a bias and of mask bits from global memory."""
        if read.reads:
            (first_row, lane), origin = rows_of_lane(), origin_of(tile.work_tile, arrays, strides)
            read.load_bias(scores.loaded, tile.j, origin, first_row, lane, strides, sizes, tile.inside)
            if has_mask:
                if not tile.inside:  # inside, the mask hides nothing
                    read.load_bits(scores.shown_bits, tile.j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def load_ahead(j, asks, work_tile, scores, arrays, strides, sizes):
        """Issues loads of what a mask_mod leaves of key tile j, the next one: after find_bits of the tile before."""
        if mod_bits:
            if asks:
                (first_row, lane), origin = rows_of_lane(), origin_of(work_tile, arrays, strides)
                read.load_bits(scores.shown_bits, j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def load_bias(base, loaded, n):
        """loaded (2, tile_n / 8) <- the bias of the n-th key tile, once TMA has loaded it."""
        four = local.array(4, uint32)
        first_row, lane = rows_of_lane()
        consumer = first_row >> 6
        ring.consumer_wait(base + 8 * consumer, n)
        at = base + bias_at + int32(ring.stage(n) * consumers + consumer) * bias_bytes
        place = boxes.place(at, first_row & 63, lane)
        for pair in range(blocks // 2):
            boxes.load(four, place, pair)
            for half in range(2):
                for r in range(2):
                    loaded[r * blocks + 2 * pair + half] = four[2 * half + r]
        fence.proxy_async()  # the next bias is written by the async proxy
        ring.consumer_release(base + 8 * consumer, n, True)

    @inlined
    def finish(base, tile, scores, arrays, strides, sizes, score):
        """acc_s (tile_n / 8, 4) <- scores of the products, -inf where one does not count. -> the factor that they still
        lack."""
        factor = score.scale * log2_e
        if tile.inside or config.scores_finished or has_mask or has_score_mod or tile.masked or tile.asks:
            if functions.present:
                if has_score_mod or tile.asks:
                    (first_row, lane), own, at = rows_of_lane(), tile_of(tile.work_tile), position(tile.work_tile)
                    left = int32(min(queries_of(own.b, arrays, strides, sizes).seqlen_q - own.first_query, queries))
                    place = functions.place_of(tile.j, own.b, own.h, first_row, lane, own.first_query, at, left)
                    s, mask_bits = scores.acc_s, scores.mask_bits
                    if tile.inside:
                        functions.apply_inside(s, mask_bits, place, tile.asks, arrays, strides, score)
                    else:
                        functions.apply(s, mask_bits, place, tile.asks, arrays, strides, score)
            if config.scores_finished:
                if boxes.present:
                    load_bias(base, scores.loaded, tile.n)
                score_tile.finish(scores.acc_s, scores.terms, scores.distance, scores.loaded, score)
                factor = float32(1)
            if not tile.inside or has_score_mod or tile.asks:
                # In many of the tiles for which a mask is read it hides nothing.
                if not has_mask or some_hidden(scores.mask_bits):
                    score_tile.mask(scores.acc_s, scores.mask_bits)
        return factor

    words = (score_tile.mask_words, read.bits_words, kept_weights.words, read.bias_words)
    of_dropout = kept_weights.find_kept, kept_weights.drop
    return named(begin, load, load_ahead, find_bits, *of_dropout, finish, words=words)
