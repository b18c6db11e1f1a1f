"""Gradients of arrays of the scores on the CPU (compiled): sums of dS over the dimensions in which the arrays are
broadcast.

One task computes one tile of the result, over every batch entry, head, query and key that shares it, in one order. So
neither threads nor tasks share an element, and the memory is that of a tile. The price is that S and dP are computed
again, and that a result without dimensions is a single task. Sums are in float64: one element may be the sum over all
scores.
"""

# mypy: ignore-errors

import numpy as np

from . import backward_plan as at, plan as slot
from .backward_panel import GRADIENTS, Keys, Tiles, panel_gradients, take_rows, take_statistics, tiles_from
from .elements import INT, compiled, fill, gather, put, row_address
from .kernel import inlined
from .panel import keys_of, panel_of, rows_from, shown_keys, sign_and_units, tiles_of
from .vectors.build import fetch_add, lanes, load, size_of, store


@compiled
def add_up(sums, ds, panel, first_row, seen, column, plan, zero):
    """sums (rows of the result's tile, its keys) += dS (keys, lanes) of a panel.

    first_row: the first row of the query tile; column: the result's column of the first key.
    """
    across, group, keys = panel.width, panel.group, seen.end - seen.first
    own_heads, own_queries = load(plan, at.OWN_HEADS, INT), load(plan, at.OWN_QUERIES, INT)
    own_keys, by_distance = load(plan, at.OWN_KEYS, INT), load(plan, at.BY_DISTANCE, INT)
    width = load(plan, slot.TILE_N, INT) if own_keys else 1
    for r in range(panel.rows):
        row, i = panel.row0 + r, (panel.row0 + r) // group
        place = INT
        if own_queries:
            place = row - first_row if own_heads else i - first_row // group
        elif own_heads:
            place = row % group
        if own_keys:
            for key in range(keys):
                to = place * width + column + key
                store(sums, to, load(sums, to, 0.0) + float(load(ds, key * across + r, zero)))
            continue
        total = 0.0
        for key in range(keys):
            value = float(load(ds, key * across + r, zero))
            # d score / d slope = -|distance|; a key that is not seen has dS = 0.
            total += -abs(i + panel.offset - seen.first - key) * value if by_distance else value
        store(sums, place, load(sums, place, 0.0) + total)


@compiled
def write_tile(sums, b, kv_head, row0, rows, key0, keys, plan, pointers):
    """Writes a tile of the result. Its strides are 0 in dimensions that the result does not have."""
    group = max(load(plan, slot.HEADS, INT) // max(load(plan, slot.HEADS_KV, INT), 1), 1)
    own_heads, own_queries = load(plan, at.OWN_HEADS, INT), load(plan, at.OWN_QUERIES, INT)
    width, dtype = (load(plan, slot.TILE_N, INT) if load(plan, at.OWN_KEYS, INT) else 1), load(plan, at.SUM_DTYPE, INT)
    start, stride = load(pointers, load(plan, at.SUM_POINTER, INT), INT), load(plan, at.SUM_STRIDE + 3, INT)
    count = group if own_heads else 1
    if own_queries:
        count = rows if own_heads else rows // group
    for place in range(count):
        i = row0 // group + (place // group if own_heads else place) if own_queries else INT
        head = kv_head * group + place % group if own_heads else INT
        to = row_address(start, plan, at.SUM_STRIDE, b, head, i)
        for key in range(keys):
            put(to + (key0 + key) * stride, dtype, load(sums, place * width + key, 0.0))


@compiled
def own_range(own, number, extent):
    """The range of a dimension that a task covers: one index if the result has the dimension, otherwise all."""
    return (number, number + 1) if own else (INT, extent)


@inlined
def run_task(task, frame, scratch, zero):
    """Task number `task`: one tile of the result."""
    kind, size, across = type(zero), size_of(zero), lanes(zero)
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    heads_kv, tile_m = load(plan, slot.HEADS_KV, INT), load(plan, slot.TILE_M, INT)
    tile_n, dtype = load(plan, slot.TILE_N, INT), load(plan, slot.DTYPE, INT)
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    group = max(load(plan, slot.HEADS, INT) // max(heads_kv, 1), 1)
    tiles, key_tiles = load(plan, slot.TILES, INT), load(plan, at.KEY_TILES, INT)
    tile_rows, all_rows = load(plan, at.SUM_ROWS, INT), load(plan, slot.SEQLEN_Q, INT) * group
    seqlen_k = load(plan, slot.SEQLEN_K, INT)
    own_batch, own_heads = load(plan, at.OWN_BATCH, INT), load(plan, at.OWN_HEADS, INT)
    own_queries, own_keys = load(plan, at.OWN_QUERIES, INT), load(plan, at.OWN_KEYS, INT)

    rest = task
    key_tile0, key_tile1 = own_range(own_keys, rest % key_tiles if own_keys else INT, key_tiles)
    rest = rest // key_tiles if own_keys else rest
    head0, head1 = own_range(own_heads, rest % heads_kv if own_heads else INT, heads_kv)
    rest = rest // heads_kv if own_heads else rest
    tile0, tile1 = own_range(own_queries, rest % tiles if own_queries else INT, tiles)
    rest = rest // tiles if own_queries else rest
    batch0, batch1 = own_range(own_batch, rest, load(plan, slot.BATCH, INT))

    sums = scratch
    p = sums + 8 * tile_m * tile_n
    ds = p + tile_n * across * size
    q = ds + tile_n * across * size
    do = q + tile_m * head_dim * size
    shift = do + tile_m * head_dim_v * size
    base = shift + tile_m * size
    delta = base + tile_m * size
    row_numbers = delta + tile_m * size
    places = row_numbers + 2 * across * size
    k = places + (2 * across + slot.OF_PANEL) * 8
    v = k + tile_n * head_dim * size
    row = v + tile_n * head_dim_v * size

    tiles = Tiles(p, ds, INT, row_numbers, places, k, v, q, do, shift, base, delta)
    fill(sums, tile_m * tile_n, 0.0)
    sign, scale_log2 = sign_and_units(plan, zero)
    q_start, do_start = load(pointers, slot.Q_AT, INT), load(pointers, at.DO, INT)
    k_row, k_step = load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.K_STRIDE + 3, INT)
    v_row, v_step = load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.V_STRIDE + 3, INT)
    for part in range((batch1 - batch0) * (head1 - head0) * (tile1 - tile0)):
        if load(load(frame, at.STOP, INT), 0, INT):
            break  # the result is no longer wanted
        row0 = (tile0 + part % (tile1 - tile0)) * tile_rows
        kv_head = head0 + part // (tile1 - tile0) % (head1 - head0)
        b = load(pointers, at.FIRST_B, INT) + batch0 + part // ((tile1 - tile0) * (head1 - head0))
        tile = rows_from(row0, tile_rows, across, b, kv_head, plan, pointers)
        begin, end = tiles_of(tile, tile_n)
        begin, end = max(begin, key_tile0), min(end, key_tile1)
        if end <= begin:
            continue
        take_rows(q, 0, row, q_start, slot.Q_STRIDE, tile, head_dim, sign, plan, zero)
        take_rows(do, 0, row, do_start, at.DO_STRIDE, tile, head_dim_v, kind(1), plan, zero)
        take_statistics(tiles, row, tile, scale_log2, plan, pointers, zero)
        k_base = row_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, b, kv_head, 0)
        v_base = row_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, b, kv_head, 0)
        for key_tile in range(begin, end):
            tile_key0 = key_tile * tile_n
            key0, key_end, _, _ = keys_of(tile, tile_key0, tile_key0 + tile_n)
            gather(k, k_base + key0 * k_row, k_row, k_step, key_end - key0, head_dim, dtype, zero)
            gather(v, v_base + key0 * v_row, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
            for number in range((tile.rows + across - 1) // across):
                panel = panel_of(tile, number)
                first, last, free, cut = keys_of(panel, key0, key_end)
                is_cut = free > first or cut < last
                first, last, asks = shown_keys(p, places, first, last, panel, plan, pointers, zero)
                if last <= first:
                    continue
                seen = Keys(first, last, is_cut, asks)
                own = tiles_from(tiles, p, ds, number * across, first - key0, plan, zero)
                panel_gradients(own, panel, seen, scale_log2, GRADIENTS, plan, pointers, zero)
                add_up(sums, ds, panel, row0, seen, first - tile_key0, plan, zero)
    row0, b = tile0 * tile_rows, load(pointers, at.FIRST_B, INT) + batch0
    key0, keys = INT, 1
    if own_keys:
        key0 = key_tile0 * tile_n
        keys = min(tile_n, seqlen_k - key0)
    write_tile(sums, b, head0, row0, min(tile_rows, all_rows - row0), key0, keys, plan, pointers)


@inlined
def run_tasks(frame, scratch, zero):
    plan, counter = load(frame, at.PLAN, INT), load(frame, at.COUNTER, INT)
    task = fetch_add(counter)
    while task < load(plan, slot.TASKS, INT):
        run_task(task, frame, scratch, zero)
        if load(load(frame, at.STOP, INT), 0, INT):
            break
        task = fetch_add(counter)


def run_sums_float32(frame, _, scratch):
    """One thread's part of the tasks."""
    run_tasks(frame, scratch, np.float32(0))


def run_sums_float64(frame, _, scratch):
    """run_sums_float32 in double precision."""
    run_tasks(frame, scratch, np.float64(0))
