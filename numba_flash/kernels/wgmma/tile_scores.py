"""What a consumer does with the scores of a key tile after their product: options, masks and the caller's functions."""

from numba import cuda, float32, int32, uint32

from ...ptx import fence, mbarrier
from ..score import fragment_functions, fragments, reads
from ..score.stage import LOG2_E
from ..steps.inlined import FALSE, TRUE, inlined
from . import barriers, bias_boxes
from .barriers import FIRST_QUERY, KEYS, POS_CUT, POS_FREE, B, H
from .work_tile import position, rows_of_lane, tile_of, word


def make(config, sides):
    """sides: a OneSide; None if no tile may be linear.

    -> (find_visible, find_shown, side_of, load_for_scores, finish_scores, hide_scores, apply, apply_inside), device
    functions. apply_inside: to a tile in which only mask_mod removes something."""
    queries, read = config.queries, reads.make(config, 1)
    origin_of, load_direct, load_bits = read.origin, read.load_bias, read.load_bits
    hide, some_hidden, has_mask = read.hide, read.some_hidden, config.has("mask")
    has_row_term = fragments.chain(config).has_row_term
    _, visible, finish, mask_scores = fragments.tile(config, 1)
    boxes, blocks, consumers = bias_boxes.make(config, 64), config.tile_n // 8, config.consumers
    boxed, place_of_bias, load_boxed = boxes.present, boxes.place, boxes.load
    bias_at, bias_bytes = config.shared_offsets()[3], config.bias_bytes
    (*_, BIAS_FULL, BIAS_EMPTY), _ = barriers.make(config)
    stage_of, phase_of = barriers.ring(max(config.bias_stages, 1))
    wait, arrive, fence_async = mbarrier.wait, mbarrier.arrive, fence.proxy_async
    functions = fragment_functions.make(config)
    one_sided, to_shift, to_linear = (False, None, None) if sides is None else (sides.present, *sides[-2:])
    log2_e = float32(LOG2_E)

    @inlined
    def find_visible(j, work_tile, sizes, mask_bits, distance):
        """mask_bits <- which of the lane's scores of key tile j count. Run it during products: it takes a while."""
        first_row, lane = rows_of_lane()
        keys = word(work_tile + KEYS)
        visible(j, first_row, lane, position(work_tile), sizes.left, sizes.right, keys, mask_bits, distance)

    @inlined
    def find_shown(j, work_tile, sizes, mask_bits, bits, distance):
        """Like find_visible, less the scores that the mask hides, whose bits have been loaded. Positions hide something
        only in some of the tiles for which the mask is read."""
        if has_mask and word(work_tile + POS_FREE) <= j < word(work_tile + POS_CUT):
            if has_row_term:
                find_visible(j, work_tile, sizes, mask_bits, distance)  # needed for the distance
            hide(mask_bits, bits, FALSE)
        else:
            find_visible(j, work_tile, sizes, mask_bits, distance)
            hide(mask_bits, bits, TRUE)

    @inlined
    def load_for_scores(j, work_tile, loaded, bits, arrays, strides, sizes, inside):
        """Issues loads of what the scores of key tile j need from global memory, before their product is issued."""
        first_row, lane = rows_of_lane()
        origin = origin_of(word(work_tile + B), word(work_tile + H), word(work_tile + FIRST_QUERY), arrays, strides)
        load_direct(loaded, j, origin, first_row, lane, strides, sizes, inside)
        if not inside:  # inside, the mask hides nothing
            load_bits(bits, j, origin, first_row, lane, arrays, strides, sizes)

    @inlined
    def load_bias(base, loaded, n):
        """loaded (2, tile_n / 8) <- the bias of the n-th key tile, once TMA has loaded it."""
        four = cuda.local.array(4, uint32)
        first_row, lane = rows_of_lane()
        at = int32(stage_of(n) * consumers + (first_row >> 6))
        wait(base + BIAS_FULL + 8 * at, phase_of(n))
        place = place_of_bias(base + bias_at + at * bias_bytes, first_row & 63, lane)
        for pair in range(blocks // 2):
            load_boxed(four, place, pair)
            for half in range(2):
                for r in range(2):
                    loaded[r * blocks + 2 * pair + half] = four[2 * half + r]
        fence_async()  # the next bias is written by the async proxy
        arrive(base + BIAS_EMPTY + 8 * at)

    @inlined
    def side_of(j, before, behind, terms, distance, shift):
        """On which side of the queries key tile j lies (one_side.py): 1, -1, or 0 for both. shift <- of its scores. Run
        it during products, behind find_visible."""
        side = int32(0)
        if one_sided:
            side = int32(1) if j < before else int32(-1) if j >= behind else int32(0)
            to_shift(terms, distance, side, shift)
        return side

    @inlined
    def finish_whole(base, acc_s, terms, distance, loaded, n, score):
        """acc_s <- finished scores of the n-th key tile."""
        if boxed:
            load_bias(base, loaded, n)
        finish(acc_s, terms, distance, loaded, score)

    @inlined
    def finish_scores(base, acc_s, terms, distance, loaded, n, side, inverse_scale, score):
        """Likewise; but scores of a tile on one side lack their shift and the factor that is returned."""
        factor = float32(1)
        if one_sided:
            if side != 0:
                to_linear(acc_s, terms, side, inverse_scale)
                factor = score.scale * log2_e
            else:
                finish_whole(base, acc_s, terms, distance, loaded, n, score)
        else:
            finish_whole(base, acc_s, terms, distance, loaded, n, score)
        return factor

    @inlined
    def hide_scores(acc_s, mask_bits):
        """acc_s <- -inf where mask_bits has no bit. In many of the tiles for which a mask is read it hides nothing."""
        if not has_mask or some_hidden(mask_bits):
            mask_scores(acc_s, mask_bits)

    def applying(functions_on):
        @inlined
        def apply(j, work_tile, acc_s, mask_bits, asks, arrays, strides, sizes, score):
            """Applies the caller's functions to the scores of key tile j. asks: mask_mod removes some of them."""
            first_row, lane = rows_of_lane()
            tile = tile_of(work_tile)
            queries_left = int32(min(sizes.seqlen_q - tile.first_query, queries))
            functions_on(
                acc_s, mask_bits, j, tile.b, tile.h, first_row, lane, position(work_tile), queries_left, asks, arrays,
                strides, score,
            )  # fmt: skip

        @inlined
        def nothing(j, work_tile, acc_s, mask_bits, asks, arrays, strides, sizes, score):
            pass

        return apply if functions.present else nothing

    made = find_visible, find_shown, side_of, load_for_scores, finish_scores, hide_scores
    return (*made, applying(functions.apply), applying(functions.apply_inside))
