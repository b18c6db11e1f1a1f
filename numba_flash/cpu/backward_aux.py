"""Gradients of the arrays that a score_mod reads, on the CPU (compiled): dS of each score times its derivative by each
number read.

Every score may contribute to every element. So the query tiles are divided among PARTS parts. Each part has its own
float64 sums of all elements, and the parts are added in order: the bits do not depend on the threads.
"""

# mypy: ignore-errors

import numpy as np

from . import backward_plan as at, plan as slot
from .backward_panel import GRADIENTS, Keys, Tiles, panel_gradients, products, take_rows, take_statistics, tiles_from
from .elements import INT, gather, row_address
from .kernel import inlined
from .panel import keys_of, panel_of, rows_from, scale_panel, shown_keys, sign_and_units, take_places, tiles_of
from .vectors.build import call_function, fetch_add, lanes, load, size_of, store


@inlined
def run_tile(task, sums, frame, scratch, zero):
    """Query tile number `task` of all query tiles."""
    kind, size, across = type(zero), size_of(zero), lanes(zero)
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    heads_kv, tile_m = load(plan, slot.HEADS_KV, INT), load(plan, slot.TILE_M, INT)
    tile_n, dtype = load(plan, slot.TILE_N, INT), load(plan, slot.DTYPE, INT)
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    units = load(plan, slot.BATCH, INT) * heads_kv
    b, kv_head = task % units // heads_kv + load(pointers, at.FIRST_B, INT), task % units % heads_kv
    tile = rows_from(task // units * tile_m, tile_m, across, b, kv_head, plan, pointers)

    p = scratch
    ds = p + tile_n * across * size
    q = ds + tile_n * across * size
    do = q + tile_m * head_dim * size
    shift = do + tile_m * head_dim_v * size
    base = shift + tile_m * size
    delta = base + tile_m * size
    row_numbers = delta + tile_m * size
    places = row_numbers + 2 * across * size
    state = places + (2 * across + slot.OF_PANEL) * 8
    k = state + at.STATE_BYTES
    v = k + tile_n * head_dim * size
    row = v + tile_n * head_dim_v * size

    store(state, at.STATE_CAP, load(plan, slot.SOFTCAP, 0.0))
    sign, scale_log2 = sign_and_units(plan, zero)
    q_start, do_start = load(pointers, slot.Q_AT, INT), load(pointers, at.DO, INT)
    k_row, k_step = load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.K_STRIDE + 3, INT)
    v_row, v_step = load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.V_STRIDE + 3, INT)
    tiles = Tiles(p, ds, INT, row_numbers, places, k, v, q, do, shift, base, delta)
    begin, end = tiles_of(tile, tile_n)
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
            keys, own = last - first, tiles_from(tiles, p, ds, number * across, first - key0, plan, zero)
            seen = Keys(first, last, is_cut, asks)
            panel_gradients(own, panel, seen, scale_log2, GRADIENTS, plan, pointers, zero)
            products(p, own.k, own.q, head_dim, keys, panel, plan, zero)  # recomputed: the scores before score_mod
            scale_panel(p, keys, across, plan, zero)
            take_places(places, panel)
            aux = load(pointers, at.AUX, INT)
            call_function(
                load(plan, at.AUX_FUNCTION, INT), (p, ds, keys, first, places, b, panel.rows, aux, state, sums)
            )


@inlined
def run_parts(frame, scratch, zero):
    plan, counter = load(frame, at.PLAN, INT), load(frame, at.COUNTER, INT)
    start = load(load(frame, at.POINTERS + at.AUX, INT), load(plan, at.AUX_SUMS, INT), INT)
    size_of_part = load(plan, at.AUX_BYTES, INT)
    tiles = load(plan, slot.TILES, INT) * load(plan, slot.BATCH, INT) * load(plan, slot.HEADS_KV, INT)
    part = fetch_add(counter)
    while part < at.PARTS:
        for task in range(part, tiles, at.PARTS):
            if load(load(frame, at.STOP, INT), 0, INT):
                break
            run_tile(task, start + part * size_of_part, frame, scratch, zero)
        part = fetch_add(counter)


def run_aux_float32(frame, _, scratch):
    """One thread's share of the parts."""
    run_parts(frame, scratch, np.float32(0))


def run_aux_float64(frame, _, scratch):
    """run_aux_float32 in double precision."""
    run_parts(frame, scratch, np.float64(0))
