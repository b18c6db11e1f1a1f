"""A consumer's scores of a key tile after their product: options, masks and the caller's functions."""

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
    """A tile of keys, for the query tile at work."""

    j: Any  # its number among the head's
    n: Any  # its number among those that the block takes
    work_tile: Any  # where the query tile is described
    inside: Any  # a constant: every row sees every key, but for those that mask_mod removes
    masked: Any  # otherwise: whether some row may not see some key
    asks: Any  # whether mask_mod removes something


class ScoreRegisters(NamedTuple):
    """Local arrays of a lane."""

    acc_s: Any  # (tile_n / 8, 4)
    loaded: Any  # the bias (2, tile_n / 8, 2), in 16 bits two in one
    mask_bits: Any  # which scores count
    shown_bits: Any  # which ones the caller's mask leaves
    terms: Any  # (2,) the rows' slopes
    distance: Any  # (2,) of the rows from the lane's first key


class ConsumerRegisters(NamedTuple):
    """Local arrays of a lane of the forward."""

    scores: ScoreRegisters
    acc_o: Any  # (head_dim_v_padded / 8, 4)
    p_frag: Any  # (tile_n / 8, 2), in float32 for each part
    m: Any  # (2,)
    l: Any  # (2,)
    alpha: Any  # (2,)
    kept: Any  # which weights count


def counting(config):
    """-> which weights of a query tile count, and how often, as kept_weights.on_fragments says it: device functions, to
    be called if `drops`. For tiles of config.tile_n keys."""
    count = kept_weights.on_fragments(config, 1, config.tile_n)

    @inlined
    def find_kept(j, work_tile, kept, arrays, sizes):
        """kept <- which weights of key tile j count. It needs no score."""
        first_row, lane = rows_of_lane()
        b, h, lane_row = word(work_tile, B), word(work_tile, H), first_row + first_row_of(lane)
        first_key = int32(j * config.tile_n + first_column_of(lane))
        count.of_queries(kept, first_key, b, h, lane_row, position(work_tile), arrays, sizes)

    return named(find=find_kept, drops=count.present, words=count.words, drop=count.drop, scale=count.scale)


def make(config):
    """-> device functions. tile: a KeyTile; scores: ScoreRegisters."""
    queries, queries_of, read = config.queries, make_queries(config), reads.make(config, 1)
    hide, some_hidden, has_mask, mod_bits = read.hide, read.some_hidden, config.has("mask"), config.mask_mod_as_bits
    chain, score_tile = fragments.chain(config), fragments.tile(config, 1)
    find_visible = block.visibility(config, config.tile_n)
    boxes, blocks, consumers = bias_boxes.make(config, 64), config.tile_n // 8, config.consumers
    bias_at, bias_bytes = config.shared_layout().bias, config.bias_bytes
    ring = pipeline.of_forward(config).bias
    functions, has_score_mod = fragment_functions.make(config), config.has("score_mod")
    log2_e = float32(LOG2_E)

    @inlined
    def row_terms(terms, work_tile, arrays, strides):
        """terms (2,) <- what a row's scores share."""
        for r in range(2):
            terms[r] = float32(0)
            if chain.has_row_term:
                first_row, lane = rows_of_lane()
                row_head = word(work_tile, H) + (first_row + first_row_of(lane) + 8 * r) % config.group_size
                terms[r] = chain.row_term(word(work_tile, B), row_head, arrays, strides)

    @inlined
    def find_bits(tile, registers, sizes):
        """mask_bits <- which scores count, if that may be asked; distance, if that is needed. It runs beside
        products, because it takes a while."""
        j, work_tile, mask_bits, distance = tile.j, tile.work_tile, registers.mask_bits, registers.distance
        # If every row sees every key, only a mask_mod hides scores: mask_bits are its bits.
        alone = tile.inside and mod_bits and not config.scores_finished
        bits, asks = registers.shown_bits, tile.asks
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
    def load(tile, registers, arrays, strides, sizes):
        """Issues loads of what the scores need from global memory, before their product is issued."""
        (first_row, lane), origin = rows_of_lane(), origin_of(tile.work_tile, arrays, strides)
        read.load_bias(registers.loaded, tile.j, origin, first_row, lane, strides, sizes, tile.inside)
        if has_mask:
            if not tile.inside:  # inside, the mask hides nothing
                read.load_bits(registers.shown_bits, tile.j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def load_ahead(j, asks, work_tile, registers, arrays, strides, sizes):
        """Issues loads of what a mask_mod leaves of key tile j, a tile ahead: after find_bits of the one before."""
        if mod_bits:
            if asks:
                (first_row, lane), origin = rows_of_lane(), origin_of(work_tile, arrays, strides)
                read.load_bits(registers.shown_bits, j, origin, first_row, lane, arrays, strides, sizes)

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
    def finish_scores(base, tile, registers, arrays, strides, sizes, score):
        """acc_s <- finished scores, -inf where a score does not count. -> the factor that the scores lack."""
        factor = score.scale * log2_e
        if tile.inside or config.scores_finished or has_mask or has_score_mod or tile.masked or tile.asks:
            if functions.present:
                if has_score_mod or tile.asks:
                    (first_row, lane), own, at = rows_of_lane(), tile_of(tile.work_tile), position(tile.work_tile)
                    left = int32(min(queries_of(own.b, arrays, strides, sizes).seqlen_q - own.first_query, queries))
                    place = functions.place_of(tile.j, own.b, own.h, first_row, lane, own.first_query, at, left)
                    s, mask_bits = registers.acc_s, registers.mask_bits
                    if tile.inside:
                        functions.apply_inside(s, mask_bits, place, tile.asks, arrays, strides, score)
                    else:
                        functions.apply(s, mask_bits, place, tile.asks, arrays, strides, score)
            if config.scores_finished:
                if boxes.present:
                    load_bias(base, registers.loaded, tile.n)
                score_tile.finish(registers.acc_s, registers.terms, registers.distance, registers.loaded, score)
                factor = float32(1)
            if not tile.inside or has_score_mod or tile.asks:
                # In many of the tiles for which a mask is read it hides nothing.
                if not has_mask or some_hidden(registers.mask_bits):
                    score_tile.mask(registers.acc_s, registers.mask_bits)
        return factor

    return named(row_terms, load, load_ahead, find_bits, finish=finish_scores)
