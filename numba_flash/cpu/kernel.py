"""The compiled part of the CPU rung: one task is one query tile with all keys that it sees.

The recurrence is FlashAttention-2's: a task holds a query tile and loops over key tiles; each row keeps its maximum m,
its sum l and its unnormalised output. All query heads of a KV head share its keys, so the rows of a tile are numbered r
= i * group + g over queries i and heads g of the group: a row's position never decreases with r. A task processes its
rows in panels (vectors/build.py). Every panel takes its own range of keys of a tile, so a diagonal costs no more than
the width of a panel.

Single rows (few rows, as in decoding) are panels of one row, with keys along the vector instead. The
result of few rows is a binary tree over leaves of LEAF_KEYS keys, which begin at multiples of that: two neighbours
are joined, and then two neighbours of these, up to the root. A task has a node of NODE_LEAVES leaves. With several
nodes it stores m, l and output of its rows in `parts`, and the last task of a tile to finish joins the nodes.
"""

# mypy: ignore-errors

import math

import numpy as np
from numba import njit

from . import plan as slot
from .counts import count
from .elements import INT, compiled, copy_in, copy_out, fill, gather, get, row_address
from .pages import gather_pages, page_address, scores_in_pages, values_in_pages
from .panel import (
    INFINITY,
    PACKED,
    composed,
    hide,
    is_featured,
    keys_of,
    pack,
    panel_of,
    query_and_head,
    removes,
    rows_from,
    rows_of_line,
    scores,
    scores_of_row,
    shown_keys,
    sign_and_units,
    tiles_of,
    values,
    values_guarded,
    values_of_row,
    values_of_row_guarded,
)
from .vectors.build import fetch_add, lanes, load, size_of, store
from .vectors.panel import FAR, all_finite, softmax_panel
from .vectors.row import rescale_row, softmax_row
from .vectors.scores import scaled_row

# Numba optimises a function again in every caller that links it, so there are two layers: leaves, and one kernel into
# which everything else is inlined.
inlined = njit(error_model="numpy", inline="always")
double = np.float64
PACK_STRIDE = 256  # bytes; v rows that are no farther apart are read in place


@inlined
def attend(state, scratch, tile, tile_first, tile_end, plan, pointers, zero):
    """The rows of a tile with key tiles [tile_first, tile_end); fills state.

    state is o (panels, head_dim_v, width), m (panels, width), l (panels, width).
    """
    kind = type(zero)
    size = size_of(zero)
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    dtype, tile_n = load(plan, slot.DTYPE, INT), load(plan, slot.TILE_N, INT)
    by_rows, width, b, kv_head = load(plan, slot.BY_ROWS, INT), tile.width, tile.b, tile.kv_head
    panels = (tile.rows + width - 1) // width
    featured, seeded = is_featured(plan), load(plan, slot.SEEDED, INT)
    hides_some = removes(plan) or seeded
    sign, scale_log2 = sign_and_units(plan, zero)

    o, m = state, state + panels * head_dim_v * width * size
    l = m + panels * width * size  # noqa: E741
    q = scratch
    s = q + panels * head_dim * width * size
    alpha = s + tile_n * lanes(zero) * size
    row_numbers = alpha + lanes(zero) * size
    places = row_numbers + 2 * lanes(zero) * size
    k_copy = places + (2 * lanes(zero) + slot.OF_PANEL) * 8
    v_copy = k_copy + tile_n * head_dim * size
    packed = sums = v_copy + tile_n * head_dim_v * size  # sums: work space of a single row, if nothing is packed
    fill(o, panels * width * head_dim_v, zero)
    fill(m, panels * width, kind(-INFINITY))
    fill(l, panels * width, zero)

    fill(q, panels * width * head_dim, zero)
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        source = row_address(load(pointers, slot.Q_AT, INT), plan, slot.Q_STRIDE, b, head, tile.first_query + i)
        to = q + ((r // width) * head_dim * width + r % width) * size
        copy_in(to, width, source, load(plan, slot.Q_STRIDE + 3, INT), head_dim, dtype, sign, zero)

    k_base = row_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, b, kv_head, 0)
    v_base = row_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, b, kv_head, 0)
    k_row, k_step = load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.K_STRIDE + 3, INT)
    v_row, v_step = load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.V_STRIDE + 3, INT)
    own_type = dtype >= slot.FLOAT32
    # Rows that are far apart are copied too: they would share few sets of the caches.
    copies_k = not own_type or k_step != size or (not by_rows and abs(k_row) > 2 * head_dim * size)
    copies_v = not own_type or v_step != size
    page_size = load(plan, slot.PAGE_SIZE, INT)
    for key_tile in range(tile_first, tile_end):
        if load(load(pointers, slot.STOP - slot.POINTERS, INT), 0, INT):
            break  # the result is no longer wanted
        key0, key_end, _, _ = keys_of(tile, key_tile * tile_n, (key_tile + 1) * tile_n)
        in_pages = page_size and key0 // page_size != (key_end - 1) // page_size
        k, v = k_base + key0 * k_row, v_base + key0 * v_row
        if page_size and not in_pages and key0 < key_end:
            k = page_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, tile, key0)
            v = page_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, tile, key0)
        in_place = in_pages and by_rows and not (copies_k or copies_v or hides_some)
        copy_k, copy_v = copies_k or (in_pages and not in_place), copies_v or (in_pages and not in_place)
        k_stride, v_stride = head_dim * size if copy_k else k_row, head_dim_v * size if copy_v else v_row
        packs = not by_rows and abs(v_stride) > PACK_STRIDE
        is_ready = is_finite = False
        for number in range(panels):
            panel = panel_of(tile, number)
            first, end, free, cut = keys_of(panel, key0, key_end)
            first, end, asks = shown_keys(s, places, first, end, panel, plan, pointers, zero)
            if end <= first:
                continue
            if not is_ready:  # a tile in which no row sees a key is not read
                is_ready = True
                if in_pages and copy_k:
                    k, v = load(pointers, slot.K_AT, INT), load(pointers, slot.V_AT, INT)
                    gather_pages(k_copy, k, slot.K_STRIDE, key0, key_end, head_dim, tile, plan, zero)
                    gather_pages(v_copy, v, slot.V_STRIDE, key0, key_end, head_dim_v, tile, plan, zero)
                elif copy_k:
                    gather(k_copy, k, k_row, k_step, key_end - key0, head_dim, dtype, zero)
                if copy_v and not in_pages:
                    gather(v_copy, v, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
                k, v = k_copy if copy_k else k, v_copy if copy_v else v
                if packs:
                    pack(packed, v, v_stride, key_end - key0, head_dim_v, zero)
                if hides_some:  # called once for all panels; otherwise for each panel, about what it sees
                    is_finite = all_finite(v, v_stride, head_dim_v, key_end - key0, zero)
            free = max(first, min(free, end))
            cut = max(free, min(cut, end))
            keys = end - first
            k_first, of_panel = k + (first - key0) * k_stride, number * width * size
            if in_place:
                k_start = load(pointers, slot.K_AT, INT)
                scores_in_pages(s, first, end, q + of_panel * head_dim, tile, plan, k_start, zero)
            elif by_rows:
                scores_of_row(s, 1, k_first, k_stride, q + of_panel * head_dim, head_dim, keys, zero)
            else:
                scores(s, k_first, k_stride, q + of_panel * head_dim, head_dim, keys, panel.rows, zero)
            if featured:
                composed((s, INT, row_numbers, places), asks, keys, first, panel, plan, pointers, zero)
            if free > first or cut < end:
                hide(s, first, end, panel, zero)
            v_first = v + (first - key0) * v_stride
            guarded = False
            if hides_some:
                guarded = not is_finite and not all_finite(v_first, v_stride, head_dim_v, keys, zero)
            elif free > first or cut < end:
                guarded = not (
                    all_finite(v_first, v_stride, head_dim_v, free - first, zero)
                    and all_finite(v + (cut - key0) * v_stride, v_stride, head_dim_v, end - cut, zero)
                )
            row_m, row_l = m + of_panel, l + of_panel
            if by_rows:
                for j in range(keys, (keys + lanes(zero) - 1) // lanes(zero) * lanes(zero)):
                    store(s, j, kind(-INFINITY))
                softmax_row(s, keys, scale_log2, row_m, row_l, alpha, zero)
            else:
                softmax_panel(s, keys, scale_log2, row_m, row_l, alpha, zero)
            if seeded:
                count(s, places, keys, first, panel, plan, pointers, zero)
            panel_o = o + of_panel * head_dim_v
            if by_rows:
                fill(sums, head_dim_v, zero)
                if guarded:
                    values_of_row_guarded(sums, v_first, v_stride, s, 1, keys, head_dim_v, zero)
                elif in_place:
                    values_in_pages(sums, first, end, s, tile, plan, load(pointers, slot.V_AT, INT), zero)
                else:
                    values_of_row(sums, v_first, v_stride, s, 1, keys, head_dim_v, zero)
                rescale_row(panel_o, alpha, sums, head_dim_v, zero)
            elif guarded:
                values_guarded(panel_o, alpha, v_first, v_stride, s, keys, head_dim_v, zero)
            else:
                if packs:
                    column = (key_end - key0) * size
                    values(panel_o, alpha, packed, PACKED, column, first - key0, s, keys, head_dim_v, panel.rows, zero)
                else:
                    values(panel_o, alpha, v, v_stride, size, first - key0, s, keys, head_dim_v, panel.rows, zero)


@compiled
def give_nodes(state, tile, plan, pointers, zero):
    """Writes the state of each row of a tile, in the layout of a tile of this row alone, of width 1."""
    head_dim_v, width, size = load(plan, slot.HEAD_DIM_V, INT), tile.width, size_of(zero)
    panels = (tile.rows + width - 1) // width
    m = panels * head_dim_v * width
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        row = tile.b * load(plan, slot.LSE_BATCH, INT) + head * load(plan, slot.LSE_HEAD, INT) + tile.first_query + i
        to, at = load(pointers, slot.LSE_AT, INT) + row * (head_dim_v + 2) * size, (r // width) * head_dim_v * width
        for d in range(head_dim_v):
            store(to, d, load(state, at + d * width + r % width, zero))
        store(to, head_dim_v, load(state, m + r, zero))
        store(to, head_dim_v + 1, load(state, m + panels * width + r, zero))


@inlined
def finish(state, scale_log2, tile, plan, pointers, zero):
    """Divides by l and writes o, and lse if wanted, of a tile's state. A term that belongs to no key is added to l."""
    if load(plan, slot.AS_NODES, INT):
        give_nodes(state, tile, plan, pointers, zero)
        return
    size = size_of(zero)
    head_dim_v, dtype = load(plan, slot.HEAD_DIM_V, INT), load(plan, slot.DTYPE, INT)
    width, b = tile.width, tile.b
    panels = (tile.rows + width - 1) // width
    m = state + panels * head_dim_v * width * size
    scale = load(plan, slot.SCALE, 0.0)
    natural = 1.0 if is_featured(plan) or scale == 0 else abs(scale)  # scale_log2 in powers of e, and not rounded
    return_lse, term_dtype = load(plan, slot.RETURN_LSE, INT), load(plan, slot.TERM_DTYPE, INT)
    has_term = term_dtype != slot.ABSENT
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        total = load(m, panels * width + r, zero)
        factor = type(zero)(1) / total if total != 0 else zero
        lse = -INFINITY
        if (return_lse or has_term) and total != 0:
            # In the units of the exponentials, so that both have the same rounding of m.
            best = load(m, r, zero)
            in_log2 = double(best * scale_log2)
            lse = in_log2 * math.log(2.0) + math.log(double(total))
            if abs(in_log2) >= FAR and abs(best) != INFINITY:  # there p was taken from m itself (vectors/panel.py)
                lse = double(best) * natural + math.log(double(total))
        if has_term:
            at = load(pointers, slot.TERM_AT, INT) + b * load(plan, slot.TERM_STRIDE, INT)
            term = get(at + head * load(plan, slot.TERM_STRIDE + 1, INT), term_dtype, 0.0)
            if term != -INFINITY:  # log(e^lse + e^term) replaces lse
                whole = max(lse, term) + math.log1p(math.exp(-abs(lse - term)))
                if term == INFINITY:  # like a score of inf, where e^(s - m) is NaN
                    whole = math.nan
                factor *= type(zero)(math.exp(lse - whole))
                lse = whole
        source = state + ((r // width) * head_dim_v * width + r % width) * size
        to = row_address(load(pointers, slot.O_AT, INT), plan, slot.O_STRIDE, b, head, tile.first_query + i)
        copy_out(to, load(plan, slot.O_STRIDE + 3, INT), source, width, head_dim_v, dtype, factor, zero)
        if return_lse:
            at = b * load(plan, slot.LSE_BATCH, INT) + head * load(plan, slot.LSE_HEAD, INT) + tile.first_query + i
            store(load(pointers, slot.LSE_AT, INT), at, type(zero)(lse))


@compiled
def join(left, right, scale_log2, tile, head_dim_v, zero):
    """left = the joined state of left's and right's keys. Each is multiplied by 2^(c * (m - joined m)). If a row sees
    no key in one of them, it gets the bits of the other."""
    width = tile.width
    panels = (tile.rows + width - 1) // width
    at_m = panels * head_dim_v * width
    at_l = at_m + panels * width
    for r in range(tile.rows):
        m_left, m_right = load(left, at_m + r, zero), load(right, at_m + r, zero)
        if m_right == -INFINITY and load(right, at_l + r, zero) == 0:  # with l != 0 all of its scores are NaN
            continue
        best = type(zero)(max(m_left, m_right))
        keep, take = weight(m_left, best, scale_log2, zero), weight(m_right, best, scale_log2, zero)
        at = (r // width) * head_dim_v * width + r % width
        for d in range(head_dim_v):
            number = at + d * width
            o = keep * load(left, number, zero) if keep != 0 else zero
            store(left, number, o + take * load(right, number, zero) if take != 0 else o)
        store(left, at_m + r, best)
        store(left, at_l + r, keep * load(left, at_l + r, zero) + take * load(right, at_l + r, zero))


@compiled
def weight(m, best, scale_log2, zero):
    """2^(c * (m - best)) for m <= best; 0 for a row without keys."""
    if m == -INFINITY:
        return zero
    # Numba's float() does not widen float32.
    m_log2, best_log2, unit = double(m * scale_log2), double(best * scale_log2), double(scale_log2)
    m_far = abs(m_log2) >= FAR and abs(m) != INFINITY  # there p was computed from m itself
    best_far = abs(best_log2) >= FAR and abs(best) != INFINITY
    m_log2 = double(m) * unit if m_far else m_log2
    best_log2 = double(best) * unit if best_far else best_log2
    away = (double(m) - double(best)) * unit if m_far and best_far else m_log2 - best_log2
    return type(zero)(2.0**away)


@inlined
def blank(state, tile, head_dim_v, zero):
    """Writes the state of a tile that has seen no keys."""
    rows = (tile.rows + tile.width - 1) // tile.width * tile.width
    fill(state, rows * head_dim_v, zero)
    fill(state + rows * head_dim_v * size_of(zero), rows, type(zero)(-INFINITY))
    fill(state + rows * (head_dim_v + 1) * size_of(zero), rows, zero)


@inlined
def join_tree(states, count, size, scale_log2, tile, head_dim_v, zero):
    """Joins `count` neighbouring states, `size` bytes apart, into the first: pairs, and then pairs of these."""
    step = 1
    while step < count:
        for at in range(0, count - step, 2 * step):
            join(states + at * size, states + (at + step) * size, scale_log2, tile, head_dim_v, zero)
        step *= 2


@inlined
def run_task(task, frame, scratch, zero):
    """Task number `task`; those with the most keys have the lowest numbers."""
    plan = load(frame, slot.PLAN, INT)
    pointers = frame + slot.POINTERS * 8
    heads_kv, chunks = load(plan, slot.HEADS_KV, INT), load(plan, slot.CHUNKS, INT)
    tile_m, tile_n = load(plan, slot.TILE_M, INT), load(plan, slot.TILE_N, INT)
    chunk, group_of_rows = task % chunks, task // chunks
    units = load(plan, slot.BATCH, INT) * heads_kv
    entry, kv_head = (group_of_rows % units) // heads_kv, (group_of_rows % units) % heads_kv
    row0 = (load(plan, slot.TILES, INT) - 1 - group_of_rows // units) * tile_m
    width = 1 if load(plan, slot.BY_ROWS, INT) else lanes(zero)
    if load(plan, slot.HAS_LINES, INT):
        line = load(pointers, slot.LINES_AT, INT) + entry * slot.LINE_NUMBERS * 8
        tile = rows_of_line(row0, tile_m, width, line, kv_head, plan)
    else:
        b = entry + load(pointers, slot.FIRST_B, INT)
        tile = rows_from(row0, tile_m, width, b, kv_head, plan, pointers)
    if tile.rows <= 0:  # the sequence has fewer queries than the longest one
        return
    begin, end = tiles_of(tile, tile_n)

    size, head_dim_v = load(plan, slot.STATE_BYTES, INT), load(plan, slot.HEAD_DIM_V, INT)
    leaf_tiles = load(plan, slot.LEAF_TILES, INT)
    leaves = slot.NODE_LEAVES if leaf_tiles else 1
    node_tiles = leaf_tiles * leaves
    own_leaves = 1  # leaves behind the last key change nothing
    if leaf_tiles:
        own_leaves = min((end - chunk * node_tiles + leaf_tiles - 1) // leaf_tiles, leaves)
        if chunk == 0:
            own_leaves = max(own_leaves, 1)
    _, scale_log2 = sign_and_units(plan, zero)
    for leaf in range(own_leaves):
        state, first, stop = scratch + leaf * size, begin, end
        if leaf_tiles:
            at = chunk * node_tiles + leaf * leaf_tiles
            first, stop = max(begin, at), min(end, at + leaf_tiles)
        if first < stop or not leaf_tiles:
            attend(state, scratch + leaves * size, tile, first, stop, plan, pointers, zero)
        else:
            blank(state, tile, head_dim_v, zero)
    join_tree(scratch, own_leaves, size, scale_log2, tile, head_dim_v, zero)
    state = scratch
    if chunks > 1:
        parts = load(frame, slot.PARTS, INT) + group_of_rows * chunks * size
        if own_leaves > 0:
            scaled_row(parts + chunk * size, scratch, size // size_of(zero), type(zero)(1), zero)
        if fetch_add(load(frame, slot.COUNTERS, INT) + (1 + group_of_rows) * 8) != chunks - 1:
            return
        nodes = min((end + node_tiles - 1) // node_tiles, chunks)  # nodes with a key that some row sees
        join_tree(parts, nodes, size, scale_log2, tile, head_dim_v, zero)
        state = parts
    finish(state, scale_log2, tile, plan, pointers, zero)


def run_tasks_float32(frame, first, scratch):
    """Run task `first`, then as many as the shared counter hands out."""
    task, tasks = first, load(load(frame, slot.PLAN, INT), slot.TASKS, INT)
    while task < tasks and not load(load(frame, slot.STOP, INT), 0, INT):
        run_task(task, frame, scratch, np.float32(0))
        task = fetch_add(load(frame, slot.COUNTERS, INT))


def run_tasks_float64(frame, first, scratch):
    """run_tasks_float32 in double precision."""
    task, tasks = first, load(load(frame, slot.PLAN, INT), slot.TASKS, INT)
    while task < tasks and not load(load(frame, slot.STOP, INT), 0, INT):
        run_task(task, frame, scratch, np.float64(0))
        task = fetch_add(load(frame, slot.COUNTERS, INT))
