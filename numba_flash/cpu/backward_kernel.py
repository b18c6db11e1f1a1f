"""dq, dk and dv on the CPU (compiled): one task is one query tile with all keys that it sees.

As in FlashAttention-2, scores are recomputed from q, k and lse, tile by tile:

    P = exp(S - lse)   dV += P^T do   dP = do V^T   dS = P * (dP - delta)   dQ += dS K   dK += dS^T Q

A task holds a query tile and loops over key tiles, so it owns its dQ. dK and dV are sums over tasks, stored for all
keys in the computing precision. The query tiles of a head are added to a key tile's sums in one order, the last one
first: a task waits until the previous one has finished with that key tile, and then reports that it has finished, too.
Tasks are handed out in that order, the heads in turn. So a task rarely waits, and always for one that has been started.
Hence the bits do not depend on the threads. When all tasks have finished, the sums become dk and dv. If a head has one
query tile, its task makes dk and dv of each key tile at once, and the sums of one key tile are all that is stored.

Rows are numbered and packed in panels as in the forward (kernel.py): dQ^T = K^T dS^T and both products of scores have
query rows along the vector; the sums over rows have head_dim along it.
"""

# mypy: ignore-errors

import numpy as np

from . import backward_plan as at, plan as slot
from .backward_panel import (
    CAPPED,
    GRADIENTS,
    WEIGHTS,
    Keys,
    Tiles,
    add_dq,
    key_sums,
    panel_gradients,
    take_rows,
    take_statistics,
    tiles_from,
    wait_for,
)
from .elements import INT, compiled, copy_out, fill, gather, row_address
from .kernel import inlined
from .panel import (
    PACKED,
    keys_of,
    pack,
    panel_of,
    query_and_head,
    rows_from,
    shown_keys,
    sign_and_units,
    tiles_of,
    values,
    values_guarded,
)
from .vectors.backward import store_release
from .vectors.build import fetch_add, lanes, load, size_of, store
from .vectors.panel import all_finite


@compiled
def keep(to, first, last, is_cut, asks):
    store(to, 0, first)
    store(to, 1, last)
    store(to, 2, np.int64(is_cut))
    store(to, 3, np.int64(asks))


@compiled
def kept(at):
    """The number that `keep` stored there."""
    return load(at, 0, INT), load(at, 1, INT), load(at, 2, INT) != 0, load(at, 3, INT) != 0


@inlined
def run_task(task, frame, scratch, zero):
    """Task number `task`: dq of its rows, and their contribution to dk and dv."""
    kind, size, across = type(zero), size_of(zero), lanes(zero)
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    wants_dq, wants_dk = load(plan, at.WANTS_DQ, INT), load(plan, at.WANTS_DK, INT)
    wants_dv, by_rows = load(plan, at.WANTS_DV, INT), load(plan, slot.BY_ROWS, INT)
    heads_kv, tile_m = load(plan, slot.HEADS_KV, INT), load(plan, slot.TILE_M, INT)
    tile_n, dtype = load(plan, slot.TILE_N, INT), load(plan, slot.DTYPE, INT)
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    columns, columns_v = load(plan, at.COLUMNS, INT), load(plan, at.COLUMNS_V, INT)
    units = load(plan, slot.BATCH, INT) * heads_kv
    unit, number = task % units, load(plan, slot.TILES, INT) - 1 - task // units
    b, kv_head = unit // heads_kv + load(pointers, at.FIRST_B, INT), unit % heads_kv
    tile = rows_from(number * tile_m, tile_m, across, b, kv_head, plan, pointers)
    panels = (tile.rows + across - 1) // across

    begin, end = tiles_of(tile, tile_n)
    before_begin, before_end = INT, INT  # the key tiles of the task that adds to the same sums before this one
    before = rows_from(tile.row0 + tile_m, tile_m, across, b, kv_head, plan, pointers)
    if before.rows > 0:
        before_begin, before_end = tiles_of(before, tile_n)
    done = load(frame, at.DONE, INT) + unit * load(plan, at.KEY_TILES, INT) * 8
    turn = load(plan, slot.TILES, INT) - number

    panel_bytes = tile_n * across * size
    p = scratch
    ds = p + (tile_m // across) * panel_bytes
    q = ds + (tile_m // across) * panel_bytes
    do = q + tile_m * head_dim * size
    dq = do + tile_m * head_dim_v * size
    q_blocks = dq + tile_m * head_dim * size
    do_blocks = q_blocks + tile_m * ((head_dim + across - 1) // across) * across * size
    shift = do_blocks + tile_m * ((head_dim_v + across - 1) // across) * across * size
    base = shift + tile_m * size
    delta = base + tile_m * size
    ones = delta + tile_m * size
    row_numbers = ones + across * size
    places = row_numbers + 2 * across * size
    slopes = places + (2 * across + slot.OF_PANEL) * 8
    seen = slopes + panel_bytes  # for each panel the first key, the end, and the results of keys_of and shown_keys
    k = seen + 4 * 8 * (tile_m // across)
    v = k + tile_n * head_dim * size
    packed = v + tile_n * head_dim_v * size
    row = packed + tile_n * head_dim * size
    own_sums_k = row + 2 * max(head_dim, head_dim_v) * size
    own_sums_v = own_sums_k + tile_n * columns * size

    sign, scale_log2 = sign_and_units(plan, zero)
    what = WEIGHTS
    if wants_dq or wants_dk:
        what = CAPPED if load(plan, slot.HAS_SOFTCAP, INT) or load(plan, slot.SCORE_MOD, INT) else GRADIENTS
    q_start, do_start = load(pointers, slot.Q_AT, INT), load(pointers, at.DO, INT)
    tiles = Tiles(p, ds, slopes, row_numbers, places, k, v, q, do, shift, base, delta)
    take_rows(q, q_blocks, row, q_start, slot.Q_STRIDE, tile, head_dim, sign, plan, zero)
    take_rows(do, do_blocks, row, do_start, at.DO_STRIDE, tile, head_dim_v, kind(1), plan, zero)
    take_statistics(tiles, row, tile, scale_log2, plan, pointers, zero)
    # 0 times NaN must not count: a key adds nothing to a row in which its weight is 0, nor the row to the key.
    q_guarded = not all_finite(q, tile_m * head_dim * size, tile_m * head_dim, 1, zero)
    do_guarded = not all_finite(do, tile_m * head_dim_v * size, tile_m * head_dim_v, 1, zero)
    fill(dq, panels * head_dim * across, zero)
    fill(ones, across, kind(1))

    k_base = row_address(load(pointers, slot.K_AT, INT), plan, slot.K_STRIDE, b, kv_head, 0)
    v_base = row_address(load(pointers, slot.V_AT, INT), plan, slot.V_STRIDE, b, kv_head, 0)
    k_row, k_step = load(plan, slot.K_STRIDE + 2, INT), load(plan, slot.K_STRIDE + 3, INT)
    v_row, v_step = load(plan, slot.V_STRIDE + 2, INT), load(plan, slot.V_STRIDE + 3, INT)
    alone = load(plan, slot.TILES, INT) == 1
    if alone and (wants_dk or wants_dv):  # of keys that no query sees
        fill(own_sums_k, tile_n * (columns + columns_v), zero)
        for key_tile in range(load(plan, at.KEY_TILES, INT)):
            if key_tile < begin or key_tile >= end:
                write_sums(unit, key_tile, own_sums_k, own_sums_v, frame, zero)
    for key_tile in range(begin, end):
        key0, key_end, _, _ = keys_of(tile, key_tile * tile_n, (key_tile + 1) * tile_n)
        if load(load(frame, at.STOP, INT), 0, INT):
            panels, key_end = INT, key0  # the result is no longer wanted, but other threads wait for their turn
        whole, some = True, False
        for panel in range(panels):
            own = panel_of(tile, panel)
            first, last, free, cut = keys_of(own, key0, key_end)
            is_cut = free > first or cut < last
            first, last, asks = shown_keys(p + panel * panel_bytes, places, first, last, own, plan, pointers, zero)
            whole, some = whole and first == key0 and last == key_end, some or first < last
            keep(seen + 32 * panel, first, last, is_cut, asks)
        k_guarded = False
        if some:
            gather(k, k_base + key0 * k_row, k_row, k_step, key_end - key0, head_dim, dtype, zero)
            gather(v, v_base + key0 * v_row, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
            k_guarded = not all_finite(k, head_dim * size, head_dim, key_end - key0, zero)
            if wants_dq and not by_rows:
                pack(packed, k, head_dim * size, key_end - key0, head_dim, zero)
        for panel in range(panels):
            first, last, is_cut, asks = kept(seen + 32 * panel)
            if last <= first:
                continue
            skip, keys = first - key0, last - first
            here = panel * panel_bytes + skip * across * size
            own_dq = dq + panel * across * size * head_dim
            own_tiles = tiles_from(tiles, p + here, ds + here, panel * across, skip, plan, zero)
            own_keys = Keys(first, last, is_cut, asks)
            own = panel_of(tile, panel)
            panel_gradients(own_tiles, own, own_keys, scale_log2, what, plan, pointers, zero)
            if wants_dq and by_rows:
                add_dq(dq, ds + here, own_tiles.k, keys, k_guarded, row, tile, plan, zero)
            elif wants_dq and k_guarded:
                values_guarded(own_dq, ones, own_tiles.k, head_dim * size, ds + here, keys, head_dim, zero)
            elif wants_dq:
                column = (key_end - key0) * size
                values(own_dq, ones, packed, PACKED, column, skip, ds + here, keys, head_dim, own.rows, zero)
        if not wants_dk and not wants_dv:
            continue
        if before_begin <= key_tile and key_tile < before_end:
            wait_for(done + key_tile * 8, turn - 1, load(frame, at.GIVE_WAY, INT))
        at_once = max(panels, 1) if whole else 1  # panels that see the same keys
        sums_k, sums_v = sums_of(unit, key_tile, frame, zero)
        if alone:
            sums_k, sums_v = own_sums_k, own_sums_v
            fill(sums_k, tile_n * (columns + columns_v), zero)
        for panel in range(0, panels, at_once):
            first, last, _, _ = kept(seen + 32 * panel)
            if last <= first:
                continue
            here = panel * panel_bytes + (first - key0) * across * size
            rows_here = panel * across * across * size
            key = first - key_tile * tile_n
            keys, block_bytes = last - first, tile_m * across * size
            queries = min(tile.rows - panel * across, at_once * across)
            if wants_dv:
                to, x = sums_v + key * columns_v * size, do_blocks + rows_here
                key_sums(to, columns_v, p + here, panel_bytes, queries, x, block_bytes, keys, do_guarded, zero)
            if wants_dk:
                to, x = sums_k + key * columns * size, q_blocks + rows_here
                key_sums(to, columns, ds + here, panel_bytes, queries, x, block_bytes, keys, q_guarded, zero)
        if alone:
            write_sums(unit, key_tile, sums_k, sums_v, frame, zero)
        else:
            store_release(done + key_tile * 8, turn)

    if wants_dq:
        factor = kind(load(plan, slot.SCALE, 0.0))
        for r in range(tile.rows):
            i, head = query_and_head(tile, r)
            source, step = dq + ((r // across) * head_dim * across + r % across) * size, across
            if by_rows:
                source, step = dq + r * head_dim * size, 1
            to = row_address(load(pointers, at.DQ, INT), plan, at.DQ_STRIDE, b, head, i)
            copy_out(to, load(plan, at.DQ_STRIDE + 3, INT), source, step, head_dim, dtype, factor, zero)


@compiled
def sums_of(unit, key_tile, frame, zero):
    """The addresses of a key tile's sums for dk and dv, among those of all keys."""
    plan, size = load(frame, at.PLAN, INT), size_of(zero)
    key = unit * load(plan, slot.SEQLEN_K, INT) + key_tile * load(plan, slot.TILE_N, INT)
    sums_k = load(frame, at.SUMS_K, INT) + key * load(plan, at.COLUMNS, INT) * size
    return sums_k, load(frame, at.SUMS_V, INT) + key * load(plan, at.COLUMNS_V, INT) * size


@compiled
def write_sums(unit, key_tile, sums_k, sums_v, frame, zero):
    """Converts the sums of a key tile of a KV head to its dk and dv."""
    kind, size = type(zero), size_of(zero)
    plan, pointers = load(frame, at.PLAN, INT), frame + at.POINTERS * 8
    b, kv_head = unit // load(plan, slot.HEADS_KV, INT), unit % load(plan, slot.HEADS_KV, INT)
    tile_n, dtype = load(plan, slot.TILE_N, INT), load(plan, slot.DTYPE, INT)
    key0 = key_tile * tile_n
    for n in range(min(tile_n, load(plan, slot.SEQLEN_K, INT) - key0)):
        if load(plan, at.WANTS_DK, INT):
            source = sums_k + n * load(plan, at.COLUMNS, INT) * size
            to = row_address(load(pointers, at.DK, INT), plan, at.DK_STRIDE, b, kv_head, key0 + n)
            step, count = load(plan, at.DK_STRIDE + 3, INT), load(plan, slot.HEAD_DIM, INT)
            copy_out(to, step, source, 1, count, dtype, kind(load(plan, slot.SCALE, 0.0)), zero)
        if load(plan, at.WANTS_DV, INT):
            source = sums_v + n * load(plan, at.COLUMNS_V, INT) * size
            to = row_address(load(pointers, at.DV, INT), plan, at.DV_STRIDE, b, kv_head, key0 + n)
            step, count = load(plan, at.DV_STRIDE + 3, INT), load(plan, slot.HEAD_DIM_V, INT)
            copy_out(to, step, source, 1, count, dtype, kind(1), zero)


GRADIENTS_OF_ROWS, RESULTS = 0, 1  # the second phase begins when the first has ended


@inlined
def run_phase(frame, phase, scratch, zero):
    """Runs the tasks of a phase that the counter hands out."""
    plan, counter = load(frame, at.PLAN, INT), load(frame, at.COUNTER, INT)
    tasks = load(plan, slot.TASKS, INT)
    if phase == RESULTS:
        tasks = load(plan, slot.BATCH, INT) * load(plan, slot.HEADS_KV, INT) * load(plan, at.KEY_TILES, INT)
    task = fetch_add(counter)  # a task that was taken must run, because others wait for it
    while task < tasks:
        if phase == RESULTS:
            key_tiles = load(plan, at.KEY_TILES, INT)
            unit, key_tile = task // key_tiles, task % key_tiles
            write_sums(unit, key_tile, *sums_of(unit, key_tile, frame, zero), frame, zero)
        else:
            run_task(task, frame, scratch, zero)
        if load(load(frame, at.STOP, INT), 0, INT):
            break
        task = fetch_add(counter)


def run_phase_float32(frame, phase, scratch):
    """One thread's part of a phase."""
    run_phase(frame, phase, scratch, np.float32(0))


def run_phase_float64(frame, phase, scratch):
    """run_phase_float32 in double precision."""
    run_phase(frame, phase, scratch, np.float64(0))
