"""Gradients of what a score_mod reads, on the CPU (compiled): dS of each score times its derivative by each number
read.

Every score may contribute to every element. So the query tiles are divided among PARTS parts. Each part has its own
float64 sums of all elements, and the parts are added in order: the bits do not depend on the threads.
"""

# mypy: ignore-errors

import numpy as np

from . import backward_plan as at
from . import plan as slot
from .backward_panel import GRADIENTS, PanelKeys, PanelTiles, keys_of, panel_gradients, take_rows, take_statistics
from .elements import INT, gather, length_and_offset, row_address
from .kernel import inlined
from .panel import scale_panel, scores, shown_keys, sign_and_units, take_places, tiles_of
from .vectors.build import call_function, fetch_add, lanes, load, size_of, store


@inlined
def run_tile(task, sums, frame, scratch, zero):
    """Query tile number `task` of all query tiles."""
    kind, size, across = type(zero), size_of(zero), lanes(zero)
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    heads_kv, tile_m = load(plan, slot.HEADS_KV, INT), load(plan, slot.TILE_M, INT)
    tile_n, dtype = load(plan, slot.TILE_N, INT), load(plan, slot.DTYPE, INT)
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    group = load(plan, slot.HEADS, INT) // heads_kv
    left, right = load(plan, slot.LEFT, INT), load(plan, slot.RIGHT, INT)
    units = load(plan, slot.BATCH, INT) * heads_kv
    b, kv_head = task % units // heads_kv, task % units % heads_kv
    row0 = task // units * tile_m
    rows = min(tile_m, load(plan, slot.SEQLEN_Q, INT) * group - row0)

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
    valid, offset = length_and_offset(plan, pointers, b)
    begin, end = tiles_of(row0, rows, group, offset, left, right, valid, tile_n)
    take_rows(q, 0, row, q_start, slot.Q_STRIDE, plan, b, kv_head, row0, rows, head_dim, sign, zero)
    take_rows(do, 0, row, do_start, at.DO_STRIDE, plan, b, kv_head, row0, rows, head_dim_v, kind(1), zero)
    take_statistics(shift, base, delta, row, scale_log2, plan, pointers, b, kv_head, row0, rows, zero)
    k_base = row_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, b, kv_head, 0)
    v_base = row_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, b, kv_head, 0)
    for key_tile in range(begin, end):
        tile_key0, tile_end = key_tile * tile_n, min((key_tile + 1) * tile_n, valid)
        key0, key_end, _ = keys_of(row0, rows, group, offset, left, right, valid, tile_key0, tile_end)
        gather(k, k_base + key0 * k_row, k_row, k_step, key_end - key0, head_dim, dtype, zero)
        gather(v, v_base + key0 * v_row, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
        for panel in range((rows + across - 1) // across):
            panel_row0, panel_rows = row0 + panel * across, min(across, rows - panel * across)
            first, last, is_cut = keys_of(panel_row0, panel_rows, group, offset, left, right, valid, key0, key_end)
            first, last, asks = shown_keys(
                p, places, first, last, panel_row0, panel_rows, across, kv_head, b, offset, plan, pointers, zero
            )
            if last <= first:
                continue
            skip, keys = first - key0, last - first
            of_panel = panel * across * size
            k_panel, v_panel = k + skip * head_dim * size, v + skip * head_dim_v * size
            q_panel, do_panel = q + of_panel * head_dim, do + of_panel * head_dim_v
            of_rows = (shift + of_panel, base + of_panel, delta + of_panel)
            tiles_here = PanelTiles(p, ds, INT, row_numbers, places, k_panel, v_panel, q_panel, do_panel, *of_rows)
            where = PanelKeys(panel_row0, panel_rows, first, keys, is_cut, asks, kv_head, b, valid, offset)
            panel_gradients(tiles_here, where, scale_log2, GRADIENTS, plan, pointers, zero)
            scores(p, k_panel, head_dim * size, q_panel, head_dim, keys, 0, zero)  # computed again, as before score_mod
            scale_panel(p, keys, across, plan, zero)
            take_places(places, panel_row0, panel_rows, across, kv_head, offset, plan)
            aux = load(pointers, at.AUX, INT)
            call_function(
                load(plan, at.AUX_FUNCTION, INT), (p, ds, keys, first, places, b, panel_rows, aux, state, sums)
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
    """The same in double precision."""
    run_parts(frame, scratch, np.float64(0))
