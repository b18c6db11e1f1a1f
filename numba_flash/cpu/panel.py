"""One panel of query rows, or a single row, with the keys of one tile (compiled): the steps of `attend`."""

# mypy: ignore-errors

import math
from typing import NamedTuple

import numpy as np

from ..problem import ranges
from . import plan as slot
from .elements import INT, compiled, fill, get, length_and_offset, row_address
from .vectors.build import LOG2_E, PANEL_VECTORS, TILE_KEYS, call_function, fetch_add, lanes, load, size_of, store
from .vectors.panel import all_finite, largest, pack_rows, score_rows, value_rows
from .vectors.row import dot_rows, value_columns
from .vectors.scores import (
    cap_scores,
    cap_scores_slopes,
    cap_scores_times_slopes,
    mask_scores,
    scale_scores,
    slope_scores,
)

score_rows_all, score_rows_4, score_rows_2, score_rows_1 = (score_rows(n) for n in (TILE_KEYS, 4, 2, 1))
value_rows_all, value_rows_4, value_rows_2, value_rows_1 = (value_rows(n) for n in (TILE_KEYS, 4, 2, 1))
score_rows_narrow, value_rows_narrow = score_rows(TILE_KEYS, 1), value_rows(TILE_KEYS, count=1)
value_rows_guarded = value_rows(1, guarded=True)
pack_rows_all, pack_rows_4, pack_rows_2, pack_rows_1 = (pack_rows(n) for n in (TILE_KEYS, 4, 2, 1))
dot_rows_4, dot_rows_1 = dot_rows(4), dot_rows(1)
value_columns_8, value_columns_4, value_columns_1, value_column = (value_columns(n) for n in (8, 4, 1, 0))
value_column_guarded = value_columns(0, guarded=True)

INFINITY = math.inf
row_keys = compiled(ranges.row_keys)
key_tiles = compiled(ranges.key_tiles)


class Rows(NamedTuple):
    """The rows [row0, row0 + rows) of a KV head, and the numbers that decide which keys each of them sees.

    A row is a query of one of the `group` query heads: row r belongs to query r // group.
    """

    row0: int
    rows: int
    width: int  # how many rows of a panel lie side by side: lanes, or 1
    b: int
    kv_head: int
    group: int
    left: int
    right: int
    valid: int
    offset: int
    first_query: int  # the row of q with the sequence's first query
    page_ids: int  # address of the sequence's page numbers


@compiled
def rows_from(row0, most, width, b, kv_head, plan, pointers):
    """The Rows from row0 on, at most `most`."""
    group = max(load(plan, slot.HEADS, INT) // max(load(plan, slot.HEADS_KV, INT), 1), 1)
    rows = min(most, load(plan, slot.SEQLEN_Q, INT) * group - row0)
    left, right = load(plan, slot.LEFT, INT), load(plan, slot.RIGHT, INT)
    valid, offset = length_and_offset(plan, pointers, b)
    return Rows(row0, rows, width, b, kv_head, group, left, right, valid, offset, INT, INT)


@compiled
def rows_of_line(row0, most, width, line, kv_head, plan):
    """rows_from for a sequence of a KV cache (kvcache.py)."""
    group = max(load(plan, slot.HEADS, INT) // max(load(plan, slot.HEADS_KV, INT), 1), 1)
    rows = min(most, load(line, slot.LINE_QUERIES, INT) * group - row0)
    left, right = load(plan, slot.LEFT, INT), load(plan, slot.RIGHT, INT)
    b, valid, offset = load(line, slot.LINE_B, INT), load(line, slot.LINE_KEYS, INT), load(line, slot.LINE_OFFSET, INT)
    first_query, page_ids = load(line, slot.LINE_ROW, INT), load(line, slot.LINE_PAGES, INT)
    return Rows(row0, rows, width, b, kv_head, group, left, right, valid, offset, first_query, page_ids)


@compiled
def panel_of(tile, panel):
    """Panel number `panel` of a tile of rows."""
    skip = panel * tile.width
    return Rows(tile.row0 + skip, min(tile.width, tile.rows - skip), *tile[2:])


@compiled
def query_and_head(rows, r):
    """The query and the query head of row r of these."""
    row = rows.row0 + r
    return row // rows.group, rows.kv_head * rows.group + row % rows.group


@compiled
def keys_of_row(rows, r):
    """The keys [first, end) that row r of these sees."""
    return row_keys((rows.row0 + r) // rows.group + rows.offset, rows.left, rows.right, rows.valid)


@compiled
def keys_of(rows, key0, key_end):
    """-> (first, end, free, cut): of the keys [key0, key_end) some row sees [first, end), and every row [free, cut)."""
    first_first, first_end = keys_of_row(rows, 0)
    last_first, last_end = keys_of_row(rows, rows.rows - 1)
    return max(key0, first_first), min(key_end, last_end), last_first, first_end


@compiled
def tiles_of(rows, tile_n):
    """The key tiles [begin, end) that some of the rows see."""
    begin, _, _, end = key_tiles(*keys_of_row(rows, 0), *keys_of_row(rows, rows.rows - 1), tile_n)
    return begin, end


@compiled
def is_narrow(rows, zero):
    """Whether the rows of a panel lie in its first vector: then most products leave out the others."""
    return rows * PANEL_VECTORS <= lanes(zero)


@compiled
def scores_of_row(s, step, k, k_stride, q, head_dim, keys, zero):
    """s (keys,), elements `step` apart, = k (keys, head_dim) @ q (head_dim,)."""
    key, row = 0, step * size_of(zero)
    while key + 4 <= keys:
        dot_rows_4(s + key * row, step, k + key * k_stride, k_stride, q, head_dim, zero)
        key += 4
    while key < keys:
        dot_rows_1(s + key * row, step, k + key * k_stride, k_stride, q, head_dim, zero)
        key += 1


@compiled
def scores(s, k, k_stride, q, head_dim, keys, rows, zero):
    """s (keys, lanes) = k (keys, head_dim) @ q (head_dim, lanes), of which `rows` exist."""
    key, row = 0, lanes(zero) * size_of(zero)
    while is_narrow(rows, zero) and key + TILE_KEYS <= keys:
        score_rows_narrow(s + key * row, k + key * k_stride, k_stride, q, head_dim, zero)
        key += TILE_KEYS
    while key + TILE_KEYS <= keys:
        score_rows_all(s + key * row, k + key * k_stride, k_stride, q, head_dim, zero)
        key += TILE_KEYS
    while key + 4 <= keys:
        score_rows_4(s + key * row, k + key * k_stride, k_stride, q, head_dim, zero)
        key += 4
    if key + 2 <= keys:
        score_rows_2(s + key * row, k + key * k_stride, k_stride, q, head_dim, zero)
        key += 2
    if key < keys:
        score_rows_1(s + key * row, k + key * k_stride, k_stride, q, head_dim, zero)


PACKED = 1  # a mark in place of a stride: real strides are multiples of an element's size, or 0


@compiled
def pack(to, v, v_stride, keys, width, zero):
    """v (keys, width) as column blocks, each contiguous, as `values` reads them."""
    size = size_of(zero)
    pack_rows_all(to, v, v_stride, keys, width, zero)
    at = width // TILE_KEYS * TILE_KEYS
    pack_rows_4(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)
    at += (width - at) // 4 * 4
    pack_rows_2(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)
    at += (width - at) // 2 * 2
    pack_rows_1(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)


@compiled
def values(o, alpha, v, v_stride, column, skip, p, keys, width, rows, zero):
    """o (width, lanes) = alpha * o + v^T @ p (keys, lanes), of which `rows` exist, with `keys` rows of v after `skip`
    others.

    v in place (v_stride bytes from row to row, column bytes from column to column), or packed, with v_stride PACKED.
    """
    size = size_of(zero)
    row = lanes(zero) * size
    at = 0
    while is_narrow(rows, zero) and at + TILE_KEYS <= width:
        stride = v_stride if v_stride != PACKED else TILE_KEYS * size
        value_rows_narrow(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += TILE_KEYS
    while at + TILE_KEYS <= width:
        stride = v_stride if v_stride != PACKED else TILE_KEYS * size
        value_rows_all(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += TILE_KEYS
    while at + 4 <= width:
        stride = v_stride if v_stride != PACKED else 4 * size
        value_rows_4(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += 4
    if at + 2 <= width:
        stride = v_stride if v_stride != PACKED else 2 * size
        value_rows_2(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += 2
    if at < width:
        stride = v_stride if v_stride != PACKED else size
        value_rows_1(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)


@compiled
def values_of_row(sums, v, v_stride, p, step, keys, width, zero):
    """sums (width,) += p (keys,), elements `step` apart, @ v (keys, width)."""
    size, vector = size_of(zero), lanes(zero) // PANEL_VECTORS
    at = 0
    while at + 8 * vector <= width:
        value_columns_8(sums + at * size, v + at * size, v_stride, p, step, keys, zero)
        at += 8 * vector
    while at + 4 * vector <= width:
        value_columns_4(sums + at * size, v + at * size, v_stride, p, step, keys, zero)
        at += 4 * vector
    while at + vector <= width:
        value_columns_1(sums + at * size, v + at * size, v_stride, p, step, keys, zero)
        at += vector
    while at < width:
        value_column(sums + at * size, v + at * size, v_stride, p, step, keys, zero)
        at += 1


@compiled
def values_guarded(o, alpha, v, v_stride, p, keys, width, zero):
    """Like `values`, if v has NaN or Inf: a key whose weight is 0 is left out. Rare, so one column at a time."""
    for at in range(width):
        value_rows_guarded(o + at * lanes(zero) * size_of(zero), alpha, v + at * size_of(zero), v_stride, p, keys, zero)


@compiled
def values_of_row_guarded(sums, v, v_stride, p, step, keys, width, zero):
    """`values_of_row`, guarded likewise."""
    for at in range(width):
        value_column_guarded(sums + at * size_of(zero), v + at * size_of(zero), v_stride, p, step, keys, zero)


@compiled
def add_bias(s, step, keys, bias, stride, dtype, zero):
    """s[j * step] += bias[j], with elements of the bias stride bytes apart."""
    if dtype == slot.FLOAT32:
        for j in range(keys):
            store(s, j * step, load(s, j * step, zero) + type(zero)(load(bias + j * stride, 0, np.float32(0))))
    else:
        for j in range(keys):
            store(s, j * step, load(s, j * step, zero) + get(bias + j * stride, dtype, zero))


@compiled
def removes(plan):
    """Whether anything but the range of keys may remove a score."""
    by_array = load(plan, slot.BIAS_DTYPE, INT) != slot.ABSENT or load(plan, slot.HAS_MASK, INT)
    return by_array or load(plan, slot.SCORE_MOD, INT) or load(plan, slot.MASK_MOD, INT)


@compiled
def is_featured(plan):
    """Whether anything but a scale comes between the products and the softmax."""
    return removes(plan) or load(plan, slot.HAS_SOFTCAP, INT) or load(plan, slot.ALIBI_DTYPE, INT) != slot.ABSENT


@compiled
def sign_and_units(plan, zero):
    """The factor of q, and the powers of 2 in the unit of a score.

    The scale's sign, or 0 for a scale of 0, goes into q. Its size goes into the exponent, which costs nothing, unless
    `scaled` needs it.
    """
    kind, scale = type(zero), load(plan, slot.SCALE, 0.0)
    sign = kind(1 if scale > 0 else (-1 if scale < 0 else 0))
    return sign, kind(LOG2_E if is_featured(plan) or scale == 0 else abs(scale) * LOG2_E)


@compiled
def shown_keys(s, places, first, end, panel, plan, pointers, zero):
    """-> (first, end, whether mask_mod hides some of the rest), of a panel and the keys [first, end).

    Keys at either end that mask_mod hides from all rows are left out. It is called for all keys, which costs less than
    their products. s, places: work space.
    """
    mask_mod = load(plan, slot.MASK_MOD, INT)
    if not mask_mod or end <= first:
        return first, end, False
    width, aux = panel.width, load(pointers, load(plan, slot.AUX_POINTER, INT), INT)
    row = width * size_of(zero)
    take_places(places, panel)
    fill(s, (end - first) * width, zero)
    call_function(mask_mod, (s, INT, end - first, first, places, panel.b, width, aux))
    if load(places, 2 * width + 1, INT):
        find_outside(0, s, places, end - first, first, panel, plan, pointers, zero)
    if largest(s, (end - first) * width, zero) != 0:
        return first, first, False
    begin, stop = first, end
    while largest(s + (begin - first) * row, width, zero) != 0:
        begin += 1
    while largest(s + (stop - 1 - first) * row, width, zero) != 0:
        stop -= 1
    return begin, stop, not all_finite(s + (begin - first) * row, INT, (stop - begin) * width, 1, zero)


@compiled
def composed(tiles, asks, keys, key0, panel, plan, pointers, zero):
    """Turns products into scores, without the range of keys: s (keys, width) for keys from key0 and a panel's rows.

    tiles: s; slopes, likewise, the derivatives by scale * product (0 = unwanted); row_numbers, work space for two
    numbers of each row; places, for two int64 numbers. asks: whether mask_mod hides some of them.
    """
    s, slopes, row_numbers, places = tiles
    kind, width = type(zero), panel.width
    count = scale_panel(s, keys, width, plan, zero)
    score_mod, mask_mod = load(plan, slot.SCORE_MOD, INT), load(plan, slot.MASK_MOD, INT)
    aux = load(pointers, load(plan, slot.AUX_POINTER, INT), INT)
    if score_mod or mask_mod:
        take_places(places, panel)
    if score_mod:
        call_function(score_mod, (s, slopes, keys, key0, places, panel.b, width, aux))
        if load(places, 2 * width + 1, INT):
            find_outside(1, s, places, keys, key0, panel, plan, pointers, zero)
    if load(plan, slot.HAS_SOFTCAP, INT):
        cap = kind(load(plan, slot.SOFTCAP, 0.0))
        if slopes == 0:
            cap_scores(s, count, cap, zero)
        elif score_mod:
            cap_scores_times_slopes(s, slopes, count, cap, zero)
        else:
            cap_scores_slopes(s, slopes, count, cap, zero)
    added(s, row_numbers, keys, key0, panel, plan, pointers, zero)
    if mask_mod and asks:
        call_function(mask_mod, (s, INT, keys, key0, places, panel.b, width, aux))


@compiled
def find_outside(is_score, s, places, keys, key0, panel, plan, pointers, zero):
    """Reports a read outside an array that a function made for a panel, into AUX: the first for a score that counts.

    A panel's function is called also for what the range of keys, a mask or mask_mod hides; there such a read is none.
    s: of score_mod what it was called with, where it read outside.
    """
    b, width, offset = panel.b, panel.width, panel.offset
    mask_mod, aux = load(plan, slot.MASK_MOD, INT), load(pointers, load(plan, slot.AUX_POINTER, INT), INT)
    function = load(plan, slot.SCORE_MOD, INT) if is_score else mask_mod
    own = places + (2 * width + 2) * 8  # places of a row alone, followed by its score and slope
    number, slope = own + 4 * 8, own + 5 * 8
    for r in range(panel.rows):
        i, head = query_and_head(panel, r)
        first, end = keys_of_row(panel, r)
        store(own, 0, i + offset)
        store(own, 1, head)
        store(own, 2, offset)
        for key in range(max(first, key0), min(end, key0 + keys)):
            if load(plan, slot.HAS_MASK, INT):
                mask = row_address(load(pointers, slot.MASK_AT, INT), plan, slot.MASK_STRIDE, b, head, i)
                if not load(mask + key * load(plan, slot.MASK_STRIDE + 3, INT), 0, np.uint8(0)):
                    continue
            if is_score and mask_mod:
                store(number, 0, zero)
                call_function(mask_mod, (number, INT, 1, key, own, b, 1, aux))
                if load(number, 0, zero) != 0:
                    continue
            score = load(s, (key - key0) * width + r, zero)
            store(number, 0, score)
            call_function(function, (number, slope, 1, key, own, b, 1, aux))
            if load(own, 3, INT):
                report = aux + load(plan, slot.OUTSIDE_AT, INT) * 8
                if fetch_add(report) == 0:
                    for at, fact in enumerate((1 - is_score, b, head, i + offset, key, i)):
                        store(report, 1 + at, fact)
                    store(report, 7, np.float64(score))  # float() does not widen float32
                return


@compiled
def scale_panel(s, keys, width, plan, zero):
    """s *= |scale|; its sign is in q. Returns the number of elements of s, rounded up to whole vectors."""
    vector = lanes(zero) // PANEL_VECTORS
    count = (keys * width + vector - 1) // vector * vector
    scale_scores(s, count, type(zero)(abs(load(plan, slot.SCALE, 0.0))), zero)
    return count


@compiled
def take_places(places, panel):
    """Position and head of each row of a panel, and the position of row 0 of q; lanes after the panel's last row get
    those of that row."""
    width, group = panel.width, panel.group
    q_pos, member = panel.row0 // group + panel.offset, panel.row0 % group  # a division for each row would take longer
    store(places, 2 * width, panel.offset)
    for r in range(width):
        store(places, r, q_pos)
        store(places, width + r, panel.kv_head * group + member)
        if r + 1 < panel.rows:
            member += 1
            if member == group:
                q_pos, member = q_pos + 1, INT


@compiled
def added(s, row_numbers, keys, key0, panel, plan, pointers, zero):
    """ALiBi, bias and mask of a panel: s (keys, width) for keys from key0.

    row_numbers: work space for two numbers of each row, its slope and its position.
    """
    kind, size = type(zero), size_of(zero)
    b, width, dtype = panel.b, panel.width, load(plan, slot.ALIBI_DTYPE, INT)
    if dtype != slot.ABSENT:
        slopes = load(pointers, slot.ALIBI_AT, INT) + b * load(plan, slot.ALIBI_STRIDE, INT)
        step = load(plan, slot.ALIBI_STRIDE + 1, INT)
        for r in range(width):
            i, head = query_and_head(panel, min(r, panel.rows - 1))
            store(row_numbers, r, get(slopes + head * step, dtype, zero))
            store(row_numbers, width + r, kind(i + panel.offset - key0))
        if width > 1:
            slope_scores(s, keys, row_numbers, row_numbers + width * size, zero)
        else:
            slope, distance = load(row_numbers, 0, zero), load(row_numbers, 1, zero)
            for j in range(keys):
                store(s, j, load(s, j, zero) - slope * abs(distance - kind(j)))
    dtype = load(plan, slot.BIAS_DTYPE, INT)
    has_mask = load(plan, slot.HAS_MASK, INT)
    if dtype == slot.ABSENT and not has_mask:
        return
    for r in range(panel.rows):
        i, head = query_and_head(panel, r)
        if dtype != slot.ABSENT:
            stride = load(plan, slot.BIAS_STRIDE + 3, INT)
            bias = row_address(load(pointers, slot.BIAS_AT, INT), plan, slot.BIAS_STRIDE, b, head, i) + key0 * stride
            add_bias(s + r * size, width, keys, bias, stride, dtype, zero)
        if has_mask:
            stride = load(plan, slot.MASK_STRIDE + 3, INT)
            mask = row_address(load(pointers, slot.MASK_AT, INT), plan, slot.MASK_STRIDE, b, head, i) + key0 * stride
            mask_scores(s + r * size, width, keys, mask, stride, zero)


@compiled
def hide(s, first, end, panel, zero):
    """-inf if a row of a panel does not see a key: s (keys, width) for keys [first, end)."""
    for r in range(panel.rows):
        row_first, row_end = keys_of_row(panel, r)
        at = s + r * size_of(zero)
        for key in range(first, min(row_first, end)):
            store(at, (key - first) * panel.width, type(zero)(-INFINITY))
        for key in range(max(row_end, first), end):
            store(at, (key - first) * panel.width, type(zero)(-INFINITY))
