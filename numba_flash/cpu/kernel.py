"""The compiled part of the CPU rung: one task is one query tile with all keys that it sees.

The recurrence is FlashAttention-2's: a task holds a query tile and loops over key tiles; each row keeps its maximum m,
its sum l and its unnormalised output. All query heads of a KV head share its keys, so the rows of a tile are numbered r
= i * group + g over queries i and heads g of the group: a row's position never decreases with r. A task processes its
rows in panels (vectors/build.py). Every panel takes its own range of keys of a tile, so a diagonal costs no more than
the width of a panel.

Single rows (few rows, as in decoding) are panels of one row, with keys along the vector instead. Many keys with few
rows are split into chunks. A task then stores m, l and output of its rows in `parts`, and the last task of a tile to
finish joins them, in the order of the chunks.
"""

# mypy: ignore-errors

import math

import numpy as np
from numba import njit

from . import plan as slot
from .counts import count
from .elements import INT, copy_in, copy_out, fill, gather, get, row_address
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
    scores,
    shown_keys,
    sign_and_units,
    tiles_of,
    values,
    values_guarded,
    values_of_row,
)
from .vectors.build import fetch_add, lanes, load, size_of, store
from .vectors.panel import FAR, all_finite, softmax_panel
from .vectors.row import softmax_row

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
    packed = v_copy + tile_n * head_dim_v * size
    fill(o, panels * width * head_dim_v, zero)
    fill(m, panels * width, kind(-INFINITY))
    fill(l, panels * width, zero)

    fill(q, panels * width * head_dim, zero)
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        source = row_address(load(pointers, slot.Q_AT, INT), plan, slot.Q_STRIDE, b, head, i)
        to = q + ((r // width) * head_dim * width + r % width) * size
        copy_in(to, width, source, load(plan, slot.Q_STRIDE + 3, INT), head_dim, dtype, sign, zero)

    k_base = row_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, b, kv_head, 0)
    v_base = row_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, b, kv_head, 0)
    k_row, k_step = load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.K_STRIDE + 3, INT)
    v_row, v_step = load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.V_STRIDE + 3, INT)
    own_type = dtype >= slot.FLOAT32
    # Rows that are far apart are copied too: they would share few sets of the caches.
    copy_k = not own_type or k_step != size or (not by_rows and abs(k_row) > 2 * head_dim * size)
    copy_v = not own_type or v_step != size
    k_stride, v_stride = head_dim * size if copy_k else k_row, head_dim_v * size if copy_v else v_row

    packs = not by_rows and abs(v_stride) > PACK_STRIDE
    for key_tile in range(tile_first, tile_end):
        if load(load(pointers, slot.STOP - slot.POINTERS, INT), 0, INT):
            break  # the result is no longer wanted
        key0, key_end, _, _ = keys_of(tile, key_tile * tile_n, (key_tile + 1) * tile_n)
        k, v = k_base + key0 * k_row, v_base + key0 * v_row
        is_ready = is_finite = False
        for number in range(panels):
            panel = panel_of(tile, number)
            first, end, free, cut = keys_of(panel, key0, key_end)
            first, end, asks = shown_keys(s, places, first, end, panel, plan, pointers, zero)
            if end <= first:
                continue
            if not is_ready:  # a tile in which no row sees a key is not read
                is_ready = True
                if copy_k:
                    gather(k_copy, k, k_row, k_step, key_end - key0, head_dim, dtype, zero)
                    k = k_copy
                if copy_v:
                    gather(v_copy, v, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
                    v = v_copy
                if packs:
                    pack(packed, v, v_stride, key_end - key0, head_dim_v, zero)
                if hides_some:  # called once for all panels; otherwise for each panel, about what it sees
                    is_finite = all_finite(v, v_stride, head_dim_v, key_end - key0, zero)
            free = max(first, min(free, end))
            cut = max(free, min(cut, end))
            keys = end - first
            k_first, of_panel = k + (first - key0) * k_stride, number * width * size
            scores(s, k_first, k_stride, q + of_panel * head_dim, head_dim, keys, by_rows, zero)
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
            if guarded:
                values_guarded(panel_o, alpha, v_first, v_stride, s, keys, head_dim_v, by_rows, zero)
            elif by_rows:
                values_of_row(panel_o, alpha, v_first, v_stride, s, keys, head_dim_v, zero)
            else:
                if packs:
                    column = (key_end - key0) * size
                    values(panel_o, alpha, packed, PACKED, column, first - key0, s, keys, head_dim_v, zero)
                else:
                    values(panel_o, alpha, v, v_stride, size, first - key0, s, keys, head_dim_v, zero)
    return scale_log2


@inlined
def finish(state, scale_log2, tile, plan, pointers, zero):
    """Divides by l and writes o, and lse if wanted, of a tile's state. A term that belongs to no key is added to l."""
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
                if term == INFINITY:  # as a score of inf, of which e^(s - m) is no number
                    whole = math.nan
                factor *= type(zero)(math.exp(lse - whole))
                lse = whole
        source = state + ((r // width) * head_dim_v * width + r % width) * size
        to = row_address(load(pointers, slot.O_AT, INT), plan, slot.O_STRIDE, b, head, i)
        copy_out(to, load(plan, slot.O_STRIDE + 3, INT), source, width, head_dim_v, dtype, factor, zero)
        if return_lse:
            at = b * load(plan, slot.LSE_BATCH, INT) + head * load(plan, slot.LSE_HEAD, INT) + i
            store(load(pointers, slot.LSE_AT, INT), at, type(zero)(lse))


@inlined
def join(parts, part_size, chunks, scale_log2, tile, head_dim_v, zero):
    """Adds the states of all chunks to the first: exact, because each is multiplied by 2^(c * (m - m of all))."""
    width = tile.width
    panels = (tile.rows + width - 1) // width
    at_m = panels * head_dim_v * width
    for r in range(tile.rows):
        best = load(parts, at_m + r, zero)
        for chunk in range(1, chunks):
            best = type(zero)(max(best, load(parts + chunk * part_size, at_m + r, zero)))
        if best == -INFINITY:
            continue
        total = zero
        at = (r // width) * head_dim_v * width + r % width
        for chunk in range(chunks):
            part = parts + chunk * part_size
            m = load(part, at_m + r, zero)
            weight = zero
            if m != -INFINITY:
                # Numba's float() does not widen float32.
                m_log2, best_log2, unit = double(m * scale_log2), double(best * scale_log2), double(scale_log2)
                m_far = abs(m_log2) >= FAR and abs(m) != INFINITY  # there p was computed from m itself
                best_far = abs(best_log2) >= FAR and abs(best) != INFINITY
                m_log2 = double(m) * unit if m_far else m_log2
                best_log2 = double(best) * unit if best_far else best_log2
                away = (double(m) - double(best)) * unit if m_far and best_far else m_log2 - best_log2
                weight = type(zero)(2.0**away)
            total += weight * load(part, at_m + panels * width + r, zero)
            if chunk == 0:
                for d in range(head_dim_v):
                    store(parts, at + d * width, load(parts, at + d * width, zero) * weight)
            elif weight != 0:
                for d in range(head_dim_v):
                    old = load(parts, at + d * width, zero)
                    store(parts, at + d * width, old + weight * load(part, at + d * width, zero))
        store(parts, at_m + r, best)
        store(parts, at_m + panels * width + r, total)


@inlined
def run_task(task, frame, scratch, zero):
    """Task number `task`; those with the most keys have the lowest numbers."""
    plan = load(frame, slot.PLAN, INT)
    pointers = frame + slot.POINTERS * 8
    heads_kv, chunks = load(plan, slot.HEADS_KV, INT), load(plan, slot.CHUNKS, INT)
    tile_m, tile_n = load(plan, slot.TILE_M, INT), load(plan, slot.TILE_N, INT)
    chunk, group_of_rows = task % chunks, task // chunks
    units = load(plan, slot.BATCH, INT) * heads_kv
    b, kv_head = (group_of_rows % units) // heads_kv, (group_of_rows % units) % heads_kv
    b += load(pointers, slot.FIRST_B, INT)
    row0 = (load(plan, slot.TILES, INT) - 1 - group_of_rows // units) * tile_m
    width = 1 if load(plan, slot.BY_ROWS, INT) else lanes(zero)
    tile = rows_from(row0, tile_m, width, b, kv_head, plan, pointers)
    begin, end = tiles_of(tile, tile_n)

    state, work = scratch, scratch + load(plan, slot.STATE_BYTES, INT)
    parts = load(frame, slot.PARTS, INT) + group_of_rows * chunks * load(plan, slot.STATE_BYTES, INT)
    if chunks > 1:
        chunk_tiles = load(plan, slot.CHUNK_TILES, INT)
        begin, end = max(begin, chunk * chunk_tiles), min(end, (chunk + 1) * chunk_tiles)
        state = parts + chunk * load(plan, slot.STATE_BYTES, INT)
    scale_log2 = attend(state, work, tile, begin, end, plan, pointers, zero)
    if chunks > 1:
        if fetch_add(load(frame, slot.COUNTERS, INT) + (1 + group_of_rows) * 8) != chunks - 1:
            return
        part_size, head_dim_v = load(plan, slot.STATE_BYTES, INT), load(plan, slot.HEAD_DIM_V, INT)
        join(parts, part_size, chunks, scale_log2, tile, head_dim_v, zero)
        state = parts
    finish(state, scale_log2, tile, plan, pointers, zero)


def run_tasks_float32(frame, first, scratch):
    """Run task `first`, then as many as the shared counter hands out."""
    task, tasks = first, load(load(frame, slot.PLAN, INT), slot.TASKS, INT)
    while task < tasks and not load(load(frame, slot.STOP, INT), 0, INT):
        run_task(task, frame, scratch, np.float32(0))
        task = fetch_add(load(frame, slot.COUNTERS, INT))


def run_tasks_float64(frame, first, scratch):
    """The same in double precision."""
    task, tasks = first, load(load(frame, slot.PLAN, INT), slot.TASKS, INT)
    while task < tasks and not load(load(frame, slot.STOP, INT), 0, INT):
        run_task(task, frame, scratch, np.float64(0))
        task = fetch_add(load(frame, slot.COUNTERS, INT))
