"""The steps of the CPU's backward kernels: a query tile, gradients of a panel, sums over rows (compiled)."""

# mypy: ignore-errors

from typing import NamedTuple

from . import backward_plan as at, plan as slot
from .counts import count
from .elements import INT, compiled, copy_in, fill, gather, row_address
from .kernel import inlined
from .panel import (
    INFINITY,
    composed,
    hide,
    is_featured,
    query_and_head,
    scores,
    scores_of_row,
    values_of_row,
    values_of_row_guarded,
)
from .vectors.backward import call_for_nothing, key_rows, load_acquire, score_gradients
from .vectors.build import LOG2_E, PANEL_VECTORS, TILE_KEYS, lanes, load, size_of, store
from .vectors.panel import subtract_base
from .vectors.row import dot_rows, rescale_row
from .vectors.scores import scaled_row

key_rows_all, key_rows_4, key_rows_1 = (key_rows(n, PANEL_VECTORS) for n in (TILE_KEYS, 4, 1))
key_vectors_all, key_vectors_1 = (key_rows(n, 1) for n in (TILE_KEYS, 1))
key_rows_guarded = key_rows(1, 1, guarded=True)
score_weights, score_gradients_plain, score_gradients_capped = (
    score_gradients(what) for what in ("weights", "plain", "capped")
)
dot_row = dot_rows(1)
FAR_LSE = 2.0**10  # in powers of 2; from here a shift in float32 has an error of 2^-14, and so would p


@compiled
def take_rows(panels, blocks, row, start, stride, tile, width, sign, plan, zero):
    """Loads a tile's rows of q or do in two orders, with zeros for rows that do not exist.

    panels (tile_m / lanes, width, lanes) times sign, for products along width, where each row is taken by itself
    (tile_m, width), and blocks (width / lanes, tile_m, lanes), for sums over rows (0 = unwanted). `stride` is the slot
    of the array's strides; `row` is work space for one row.
    """
    size, across = size_of(zero), tile.width
    tile_m, dtype = load(plan, slot.TILE_M, INT), load(plan, slot.DTYPE, INT)
    own_type = slot.FLOAT32 if size == 4 else slot.FLOAT64
    fill(panels, tile_m * width, zero)
    if blocks != 0:
        fill(blocks, tile_m * ((width + across - 1) // across) * across, zero)
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        source = row_address(start, plan, stride, tile.b, head, i)
        gather(row, source, 0, load(plan, stride + 3, INT), 1, width, dtype, zero)
        if load(plan, slot.BY_ROWS, INT):
            scaled_row(panels + r * width * size, row, width, sign, zero)
        else:
            to = panels + ((r // across) * width * across + r % across) * size
            copy_in(to, across, row, size, width, own_type, sign, zero)
        if blocks == 0:
            continue
        for column in range(0, width, across):
            to = blocks + ((column // across) * tile_m + r) * across * size
            scaled_row(to, row + column * size, min(across, width - column), type(zero)(1), zero)


@compiled
def take_statistics(tiles, row, tile, scale_log2, plan, pointers, zero):
    """shift = -lse in powers of 2 and delta = rowsum(do * o) - dlse of a query tile; `row` is work space for two rows.

    A row that sees no key has lse = -inf. Its shift is also -inf, so that each of its keys has weight 0. Rows that do
    not exist get the same. base is 0. If lse is far from 0, base is lse in units of the scores, to be subtracted from
    them, and shift is 0 (as in exponents of vectors/panel.py).
    """
    kind, size = type(zero), size_of(zero)
    shift, base, delta, b = tiles.shift, tiles.base, tiles.delta, tile.b
    tile_m, dtype = load(plan, slot.TILE_M, INT), load(plan, slot.DTYPE, INT)
    head_dim_v = load(plan, slot.HEAD_DIM_V, INT)
    fill(shift, tile_m, kind(-INFINITY))
    fill(base, tile_m, zero)
    fill(delta, tile_m, zero)
    other = row + head_dim_v * size
    for r in range(tile.rows):
        i, head = query_and_head(tile, r)
        lse_at = b * load(plan, slot.LSE_BATCH, INT) + head * load(plan, slot.LSE_HEAD, INT) + i
        lse = load(load(pointers, slot.LSE_AT, INT), lse_at, zero)
        if lse != -INFINITY:
            in_log2 = kind(-float(lse) * LOG2_E)
            if abs(in_log2) >= FAR_LSE and lse != INFINITY:
                in_log2 = zero
                store(base, r, kind(float(lse) * (LOG2_E / float(scale_log2))))
            store(shift, r, in_log2)
        o = row_address(load(pointers, slot.O_AT, INT), plan, slot.O_STRIDE, b, head, i)
        do = row_address(load(pointers, at.DO, INT), plan, at.DO_STRIDE, b, head, i)
        gather(row, o, 0, load(plan, slot.O_STRIDE + 3, INT), 1, head_dim_v, dtype, zero)
        gather(other, do, 0, load(plan, at.DO_STRIDE + 3, INT), 1, head_dim_v, dtype, zero)
        dot_row(delta + r * size, 1, row, 0, other, head_dim_v, zero)
        if load(plan, at.HAS_DLSE, INT):
            dlse = row_address(load(pointers, at.DLSE, INT), plan, at.DLSE_STRIDE, b, head, i)
            store(delta, r, load(delta, r, zero) - load(dlse, 0, zero))


WEIGHTS, GRADIENTS, CAPPED = range(3)


class Tiles(NamedTuple):
    """Addresses of results, of their work space, and of tiles from some row and key on."""

    p: int  # (keys, lanes)
    ds: int  # likewise
    slopes: int  # likewise: derivatives of capped scores
    row_numbers: int
    places: int
    k: int
    v: int
    q: int
    do: int
    shift: int
    base: int
    delta: int


class Keys(NamedTuple):
    """The keys [first, end) that some rows of a panel see."""

    first: int
    end: int
    is_cut: bool  # whether some row does not see all of them
    asks: bool  # whether mask_mod hides some of them


@inlined
def tiles_from(tiles, p, ds, row, key, plan, zero):
    """The tiles from row `row` and key `key` on, with other arrays for P and dS."""
    size = size_of(zero)
    k, q = load(plan, slot.HEAD_DIM, INT) * size, row * size
    v = load(plan, slot.HEAD_DIM_V, INT) * size
    rest = tiles.k + key * k, tiles.v + key * v, tiles.q + row * k, tiles.do + row * v
    of_rows = tiles.shift + q, tiles.base + q, tiles.delta + q
    return Tiles(p, ds, tiles.slopes, tiles.row_numbers, tiles.places, *rest, *of_rows)


@compiled
def products(s, k, q, width, keys, panel, plan, zero):
    """s (keys, lanes) = k (keys, width) @ q of a panel, in the order of take_rows."""
    size = size_of(zero)
    if not load(plan, slot.BY_ROWS, INT):
        scores(s, k, width * size, q, width, keys, panel.rows, zero)
        return
    fill(s, keys * panel.width, zero)  # a function of scores also meets those of no row
    for r in range(panel.rows):
        scores_of_row(s + r * size, panel.width, k, width * size, q + r * width * size, width, keys, zero)


@compiled
def add_dq(dq, ds, k, keys, guarded, work, tile, plan, zero):
    """dq (rows, width) += dS^T (lanes, keys) @ k (keys, width), where each row is taken by itself. work: two rows."""
    width, size = load(plan, slot.HEAD_DIM, INT), size_of(zero)
    store(work, width, type(zero)(1))
    for r in range(tile.rows):
        fill(work, width, zero)
        if guarded:
            values_of_row_guarded(work, k, width * size, ds + r * size, tile.width, keys, width, zero)
        else:
            values_of_row(work, k, width * size, ds + r * size, tile.width, keys, width, zero)
        rescale_row(dq + r * width * size, work + width * size, work, width, zero)


@compiled
def panel_gradients(tiles, panel, seen, scale_log2, what, plan, pointers, zero):
    """p and dS of a panel.

    what: WEIGHTS = p alone; GRADIENTS = dS of the scores that enter the softmax; CAPPED = dS of the scores before
    score_mod and the cap.
    """
    p, ds, slopes, row_numbers, places, k, v, q, do, shift, base, delta = tiles
    first, end, is_cut, asks = seen
    keys = end - first
    head_dim, head_dim_v = load(plan, slot.HEAD_DIM, INT), load(plan, slot.HEAD_DIM_V, INT)
    products(p, k, q, head_dim, keys, panel, plan, zero)
    if is_featured(plan):
        own_slopes = slopes if what == CAPPED else INT
        composed((p, own_slopes, row_numbers, places), asks, keys, first, panel, plan, pointers, zero)
    if is_cut:
        hide(p, first, end, panel, zero)
    subtract_base(p, keys, base, zero)
    if what == WEIGHTS:
        score_weights(p, ds, slopes, keys, scale_log2, shift, delta, zero)
        if load(plan, slot.SEEDED, INT):
            count(p, places, keys, first, panel, plan, pointers, zero)
        return
    products(ds, v, do, head_dim_v, keys, panel, plan, zero)
    if load(plan, slot.SEEDED, INT):  # dP is the gradient of the weights before any are dropped
        count(ds, places, keys, first, panel, plan, pointers, zero)
    if what == CAPPED:
        score_gradients_capped(p, ds, slopes, keys, scale_log2, shift, delta, zero)
    else:
        score_gradients_plain(p, ds, slopes, keys, scale_log2, shift, delta, zero)
    if load(plan, slot.SEEDED, INT):  # dV takes P after weights are dropped
        count(p, places, keys, first, panel, plan, pointers, zero)


@compiled
def key_sums(to, columns, weights, panel_bytes, queries, x, block_bytes, keys, guarded, zero):
    """to (keys, columns) += weights^T @ x: P^T do or dS^T q over `queries` rows of panels.

    weights: of a panel (keys, lanes), panels panel_bytes apart; x: blocks of `lanes` columns, block_bytes apart, each
    (rows, lanes). columns is a multiple of a vector's width. guarded: x has NaN or Inf, and rows with weight 0 are left
    out. This is rare, so it goes one key and one vector at a time, with the same bits elsewhere.
    """
    size, across = size_of(zero), lanes(zero)
    vector = across // PANEL_VECTORS
    row, stride = across * size, columns * size
    if guarded:
        for column in range(0, columns, vector):
            own_x, own_to = x + column // across * block_bytes + column % across * size, to + column * size
            for key in range(keys):
                key_rows_guarded(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
        return
    for column in range(0, columns - across + 1, across):
        own_x, own_to = x + column // across * block_bytes, to + column * size
        key = 0
        while key + TILE_KEYS <= keys:
            key_rows_all(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
            key += TILE_KEYS
        while key + 4 <= keys:
            key_rows_4(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
            key += 4
        while key < keys:
            key_rows_1(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
            key += 1
    for column in range(columns // across * across, columns, vector):
        own_x, own_to = x + column // across * block_bytes + column % across * size, to + column * size
        key = 0
        while key + TILE_KEYS <= keys:
            key_vectors_all(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
            key += TILE_KEYS
        while key < keys:
            key_vectors_1(own_to + key * stride, stride, weights + key * row, panel_bytes, queries, own_x, zero)
            key += 1


@compiled
def wait_for(address, number, give_way):
    """Waits until another thread has written `number`. Almost always it has; otherwise lets other threads run."""
    tries = 0
    while load_acquire(address) != number:
        tries += 1
        if tries > 100 and give_way != 0:
            call_for_nothing(give_way)
