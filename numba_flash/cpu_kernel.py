"""The compiled part of the CPU rung: one task is one tile of query rows against the keys it sees.

The recurrence is FlashAttention-2's: the tile of queries stays, key tiles pass by, each row keeps its
maximum m, its sum l and its unnormalised output. All query heads of a KV head share its keys, so the
rows of a tile are numbered r = i * group + g over queries i and heads g of the group: a row's position
never decreases with r, whatever the group. A task goes through its rows in panels (simd.py), and every
panel cuts its own key range out of the tile, so a diagonal costs no more than a panel's width.

Rows alone (few rows, as in decoding) are panels of one row, whose keys lie along the vector instead.
Long keys with few rows are split into chunks; a task then leaves its rows' m, l and output in `parts`,
and the last task of a tile to finish joins them, in the order of the chunks.
"""

import math

import numpy as np
from numba import njit

from . import ranges
from .cpu_plan import (
    ABSENT, ALIBI_DTYPE, ALIBI_STRIDE, BATCH, BFLOAT16, BIAS_DTYPE, BIAS_STRIDE, BY_ROWS, CHUNK_TILES, CHUNKS,
    COUNTERS, DTYPE, FLOAT16, FLOAT32, HAS_MASK, HAS_SEQLENS_K, HAS_SOFTCAP, HEAD_DIM, HEAD_DIM_V, HEADS, HEADS_KV,
    K_STRIDE, LEFT, MASK_STRIDE, O_STRIDE, PARTS, PLAN, POINTERS, Q_OFFSET, Q_OFFSET_SOURCE, Q_OFFSET_STRIDE, Q_STRIDE, RETURN_LSE,
    RIGHT, SCALE, SEQLEN_K, SEQLEN_Q, SEQLENS_K_STRIDE, SOFTCAP, STATE_BYTES, TASKS, TILE_M, TILE_N, TILES, V_STRIDE,
)  # fmt: skip
from .simd import (
    LOG2_E, PANEL_VECTORS, TILE_KEYS, bits_float, fetch_add, float_bits, lanes, load, size_of, store,
)  # fmt: skip
from .simd_panel import all_finite, pack_rows, score_rows, softmax_panel, value_rows
from .simd_scores import (
    cap_scores, copy_row, scale_scores, slope_scores, widen_bfloat, widen_half,
)  # fmt: skip
from .simd_row import dot_rows, softmax_row, value_columns

# Numba optimises a function again in every caller that links it, so there are two layers: leaves, and one
# kernel that everything else is inlined into. The wrappers for Python would be compiled too.
compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
inlined = njit(error_model="numpy", inline="always")
row_keys = compiled(ranges.row_keys)
key_tiles = compiled(ranges.key_tiles)

score_rows_all, score_rows_4, score_rows_2, score_rows_1 = (score_rows(n) for n in (TILE_KEYS, 4, 2, 1))
value_rows_all, value_rows_4, value_rows_2, value_rows_1 = (value_rows(n) for n in (TILE_KEYS, 4, 2, 1))
value_rows_guarded = value_rows(1, guarded=True)
pack_rows_all, pack_rows_4, pack_rows_2, pack_rows_1 = (pack_rows(n) for n in (TILE_KEYS, 4, 2, 1))
dot_rows_4, dot_rows_1 = dot_rows(4), dot_rows(1)
value_columns_8, value_columns_1, value_column = (value_columns(n) for n in (8, 1, 0))
value_column_guarded = value_columns(0, guarded=True)

INT = np.int64(0)
PACK_STRIDE = 256  # bytes; v rows not farther apart are read where they are
INFINITY = math.inf


# Elements: any type and stride in, the compute type out, and back.


@compiled
def half_to_float(bits):
    """float16 bits (an int64) to float32. Scaling by 2^112 moves the exponent and makes subnormals normal."""
    magnitude = (bits & 0x7FFF) << 13
    if magnitude >= 0x7C00 << 13:
        return float_bits(((bits & 0x8000) << 16) | magnitude | 0x7F800000)
    return float_bits(((bits & 0x8000) << 16) | bits_float(float_bits(magnitude) * np.float32(2.0**112)))


@compiled
def float_to_half(value):
    """float32 to float16 bits, to nearest, ties to even."""
    bits = bits_float(value)
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return sign | 0x7E00
    if magnitude >= 143 << 23:  # 65536
        return sign | 0x7C00
    if magnitude < 113 << 23:  # subnormal: adding 1/2 leaves the rounded result in the low bits
        return sign | (bits_float(float_bits(magnitude) + np.float32(0.5)) - (126 << 23))
    return sign | ((magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13)


@compiled
def float_to_bfloat(value):
    """float32 to bfloat16 bits, to nearest, ties to even."""
    bits = bits_float(value)
    if bits & 0x7FFFFFFF > 0x7F800000:
        return (bits >> 16) | 0x40
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@compiled
def get(address, dtype, zero):
    """The element at an address, in the precision of zero."""
    kind = type(zero)
    if dtype == FLOAT32:
        return kind(load(address, 0, np.float32(0)))
    if dtype == BFLOAT16:
        return kind(float_bits(np.int64(load(address, 0, np.uint16(0))) << 16))
    if dtype == FLOAT16:
        return kind(half_to_float(np.int64(load(address, 0, np.uint16(0)))))
    return kind(load(address, 0, np.float64(0)))


@compiled
def copy_in(to, step, source, stride, count, dtype, sign, zero):
    """to[i * step] = sign * source[i], the source's elements of any type, stride bytes apart."""
    if dtype == FLOAT32:
        for i in range(count):
            store(to, i * step, sign * load(source + i * stride, 0, np.float32(0)))
    elif dtype == BFLOAT16:
        for i in range(count):
            store(to, i * step, sign * float_bits(np.int64(load(source + i * stride, 0, np.uint16(0))) << 16))
    elif dtype == FLOAT16:
        for i in range(count):
            store(to, i * step, sign * half_to_float(np.int64(load(source + i * stride, 0, np.uint16(0)))))
    else:
        for i in range(count):
            store(to, i * step, sign * type(zero)(load(source + i * stride, 0, np.float64(0))))


@compiled
def copy_out(to, stride, source, step, count, dtype, factor, zero):
    """to[i] = factor * source[i * step], to's elements of the problem's type, stride bytes apart."""
    if dtype == FLOAT16:
        for i in range(count):
            store(to + i * stride, 0, np.uint16(float_to_half(np.float32(load(source, i * step, zero) * factor))))
    elif dtype == BFLOAT16:
        for i in range(count):
            store(to + i * stride, 0, np.uint16(float_to_bfloat(np.float32(load(source, i * step, zero) * factor))))
    else:
        for i in range(count):
            store(to + i * stride, 0, load(source, i * step, zero) * factor)


# A panel against one key tile.


@compiled
def scores(s, k, k_stride, q, head_dim, keys, by_rows, zero):
    """s (keys, width) = k (keys, head_dim) @ q (head_dim, width)."""
    size = size_of(zero)
    key = 0
    if by_rows:
        while key + 4 <= keys:
            dot_rows_4(s + key * size, k + key * k_stride, k_stride, q, head_dim, zero)
            key += 4
        while key < keys:
            dot_rows_1(s + key * size, k + key * k_stride, k_stride, q, head_dim, zero)
            key += 1
        return
    row = lanes(zero) * size
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


@compiled
def pack(to, v, v_stride, keys, width, zero):
    """v (keys, width) as column blocks, each contiguous: what `values` reads."""
    size = size_of(zero)
    pack_rows_all(to, v, v_stride, keys, width, zero)
    at = width // TILE_KEYS * TILE_KEYS
    pack_rows_4(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)
    at += (width - at) // 4 * 4
    pack_rows_2(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)
    at += (width - at) // 2 * 2
    pack_rows_1(to + at * keys * size, v + at * size, v_stride, keys, width - at, zero)


@compiled
def values(o, alpha, v, v_stride, column, skip, p, keys, width, zero):
    """o (width, lanes) = alpha * o + v^T @ p (keys, lanes), v being `keys` rows after `skip` others.

    v as it lies (v_stride bytes from row to row, column bytes from column to column), or with v_stride 0 packed.
    """
    size = size_of(zero)
    row = lanes(zero) * size
    at = 0
    while at + TILE_KEYS <= width:
        stride = v_stride if v_stride != 0 else TILE_KEYS * size
        value_rows_all(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += TILE_KEYS
    while at + 4 <= width:
        stride = v_stride if v_stride != 0 else 4 * size
        value_rows_4(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += 4
    if at + 2 <= width:
        stride = v_stride if v_stride != 0 else 2 * size
        value_rows_2(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)
        at += 2
    if at < width:
        stride = v_stride if v_stride != 0 else size
        value_rows_1(o + at * row, alpha, v + at * column + skip * stride, stride, p, keys, zero)


@compiled
def values_of_row(o, alpha, v, v_stride, p, keys, width, zero):
    """o (width,) = alpha * o + p (keys,) @ v (keys, width)."""
    size, vector = size_of(zero), lanes(zero) // PANEL_VECTORS
    at = 0
    while at + 8 * vector <= width:
        value_columns_8(o + at * size, alpha, v + at * size, v_stride, p, keys, zero)
        at += 8 * vector
    while at + vector <= width:
        value_columns_1(o + at * size, alpha, v + at * size, v_stride, p, keys, zero)
        at += vector
    while at < width:
        value_column(o + at * size, alpha, v + at * size, v_stride, p, keys, zero)
        at += 1


@compiled
def values_guarded(o, alpha, v, v_stride, p, keys, width, by_rows, zero):
    """The same where v holds NaN or Inf: a key whose weight is 0 is left out. Rare, so one column at a time."""
    size = size_of(zero)
    for at in range(width):
        if by_rows:
            value_column_guarded(o + at * size, alpha, v + at * size, v_stride, p, keys, zero)
        else:
            value_rows_guarded(o + at * lanes(zero) * size, alpha, v + at * size, v_stride, p, keys, zero)


@compiled
def add_bias(s, step, keys, bias, stride, dtype, zero):
    """s[j * step] += bias[j], the bias's elements stride bytes apart."""
    if dtype == FLOAT32:
        for j in range(keys):
            store(s, j * step, load(s, j * step, zero) + type(zero)(load(bias + j * stride, 0, np.float32(0))))
    else:
        for j in range(keys):
            store(s, j * step, load(s, j * step, zero) + get(bias + j * stride, dtype, zero))


@compiled
def apply_mask(s, step, keys, mask, stride, zero):
    """s[j * step] = -inf where the mask is 0."""
    for j in range(keys):
        x = load(s, j * step, zero)
        store(s, j * step, type(zero)(-INFINITY) if load(mask, j * stride, np.uint8(0)) == 0 else x)


@compiled
def features(s, alibi, keys, key0, first_row, rows, width, kv_head, b, offset, plan, pointers, zero):
    """Scale, softcap, ALiBi, bias and mask of a panel: s (keys, width) for keys from key0, `rows` rows of it.

    alibi is room for two numbers a row.
    """
    kind, size = type(zero), size_of(zero)
    group = load(plan, HEADS, INT) // load(plan, HEADS_KV, INT)
    vector = lanes(zero) // PANEL_VECTORS
    count = (keys * width + vector - 1) // vector * vector
    scale_scores(s, count, kind(abs(load(plan, SCALE, 0.0))), zero)
    if load(plan, HAS_SOFTCAP, INT):
        cap_scores(s, count, kind(load(plan, SOFTCAP, 0.0)), zero)
    dtype = load(plan, ALIBI_DTYPE, INT)
    if dtype != ABSENT:
        slopes = load(pointers, 7, INT) + b * load(plan, ALIBI_STRIDE, INT) * bytes_of(dtype)
        step = load(plan, ALIBI_STRIDE + 1, INT) * bytes_of(dtype)
        for r in range(width):
            row = first_row + min(r, rows - 1)
            slope = get(slopes + (kv_head * group + row % group) * step, dtype, zero)
            store(alibi, r, slope)
            store(alibi, width + r, kind(row // group + offset - key0))
        if width > 1:
            slope_scores(s, keys, alibi, alibi + width * size, zero)
        else:
            slope, distance = load(alibi, 0, zero), load(alibi, 1, zero)
            for j in range(keys):
                store(s, j, load(s, j, zero) - slope * abs(distance - kind(j)))
    dtype = load(plan, BIAS_DTYPE, INT)
    has_mask = load(plan, HAS_MASK, INT)
    if dtype == ABSENT and not has_mask:
        return
    for r in range(rows):
        i, head = (first_row + r) // group, kv_head * group + (first_row + r) % group
        if dtype != ABSENT:
            at = (
                b * load(plan, BIAS_STRIDE, INT) + head * load(plan, BIAS_STRIDE + 1, INT)
                + i * load(plan, BIAS_STRIDE + 2, INT) + key0 * load(plan, BIAS_STRIDE + 3, INT)
            )  # fmt: skip
            bias, stride = load(pointers, 5, INT) + at * bytes_of(dtype), load(plan, BIAS_STRIDE + 3, INT)
            add_bias(s + r * size, width, keys, bias, stride * bytes_of(dtype), dtype, zero)
        if has_mask:
            at = (
                b * load(plan, MASK_STRIDE, INT) + head * load(plan, MASK_STRIDE + 1, INT)
                + i * load(plan, MASK_STRIDE + 2, INT) + key0 * load(plan, MASK_STRIDE + 3, INT)
            )  # fmt: skip
            apply_mask(s + r * size, width, keys, load(pointers, 6, INT) + at, load(plan, MASK_STRIDE + 3, INT), zero)


@compiled
def bytes_of(dtype):
    """Size of an element."""
    return np.int64(2) if dtype <= BFLOAT16 else (np.int64(4) if dtype == FLOAT32 else np.int64(8))


# A task.


@compiled
def fill(to, count, value):
    for i in range(count):
        store(to, i, value)


@compiled
def gather(to, source, row_stride, stride, rows, width, dtype, zero):
    """to (rows, width) = rows of k or v, made contiguous and converted."""
    size = size_of(zero)
    for row in range(rows):
        at, element = to + row * width * size, source + row * row_stride
        if size == 4 and stride == 2 and dtype == BFLOAT16:
            widen_bfloat(at, element, width, zero)
        elif size == 4 and stride == 2 and dtype == FLOAT16:
            widen_half(at, element, width, zero)
        elif stride == size and dtype >= FLOAT32:
            copy_row(at, element, width, zero)
        else:
            copy_in(at, 1, element, stride, width, dtype, type(zero)(1), zero)


@inlined
def attend(state, scratch, plan, pointers, b, kv_head, row0, rows, tile_first, tile_end, valid, offset, zero):
    """Rows [row0, row0 + rows) of a KV head against key tiles [tile_first, tile_end); fills state.

    state is o (panels, head_dim_v, width), m (panels, width), l (panels, width).
    """
    kind = type(zero)
    size = size_of(zero)
    head_dim, head_dim_v = load(plan, HEAD_DIM, INT), load(plan, HEAD_DIM_V, INT)
    group = load(plan, HEADS, INT) // load(plan, HEADS_KV, INT)
    dtype, tile_n = load(plan, DTYPE, INT), load(plan, TILE_N, INT)
    left, right = load(plan, LEFT, INT), load(plan, RIGHT, INT)
    by_rows = load(plan, BY_ROWS, INT)
    width = 1 if by_rows else lanes(zero)
    panels = (rows + width - 1) // width
    removes = load(plan, BIAS_DTYPE, INT) != ABSENT or load(plan, HAS_MASK, INT)
    featured = removes or load(plan, HAS_SOFTCAP, INT) or load(plan, ALIBI_DTYPE, INT) != ABSENT
    scale = load(plan, SCALE, 0.0)
    # The scale's sign, or its being zero, goes into q; its size into the exponent, which costs nothing.
    sign = kind(1 if scale > 0 else (-1 if scale < 0 else 0))
    scale_log2 = kind(LOG2_E if featured or scale == 0 else abs(scale) * LOG2_E)

    o, m = state, state + panels * head_dim_v * width * size
    l = m + panels * width * size  # noqa: E741
    q = scratch
    s = q + panels * head_dim * width * size
    alpha = s + tile_n * lanes(zero) * size
    alibi = alpha + lanes(zero) * size
    k_copy = alibi + 2 * lanes(zero) * size
    v_copy = k_copy + tile_n * head_dim * size
    packed = v_copy + tile_n * head_dim_v * size
    fill(o, panels * width * head_dim_v, zero)
    fill(m, panels * width, kind(-INFINITY))
    fill(l, panels * width, zero)

    fill(q, panels * width * head_dim, zero)
    for r in range(rows):
        i, head = (row0 + r) // group, kv_head * group + (row0 + r) % group
        source = load(pointers, 0, INT) + (
            b * load(plan, Q_STRIDE, INT) + head * load(plan, Q_STRIDE + 1, INT) + i * load(plan, Q_STRIDE + 2, INT)
        )
        to = q + ((r // width) * head_dim * width + r % width) * size
        copy_in(to, width, source, load(plan, Q_STRIDE + 3, INT), head_dim, dtype, sign, zero)

    k_base = load(pointers, 1, INT) + b * load(plan, K_STRIDE, INT) + kv_head * load(plan, K_STRIDE + 1, INT)
    v_base = load(pointers, 2, INT) + b * load(plan, V_STRIDE, INT) + kv_head * load(plan, V_STRIDE + 1, INT)
    k_row, k_step = load(plan, K_STRIDE + 2, INT), load(plan, K_STRIDE + 3, INT)
    v_row, v_step = load(plan, V_STRIDE + 2, INT), load(plan, V_STRIDE + 3, INT)
    own_type = dtype >= FLOAT32
    # Rows far apart are copied too: they would share a few sets of the caches.
    copy_k = not own_type or k_step != size or (not by_rows and abs(k_row) > 2 * head_dim * size)
    copy_v = not own_type or v_step != size
    k_stride, v_stride = head_dim * size if copy_k else k_row, head_dim_v * size if copy_v else v_row

    packs = not by_rows and abs(v_stride) > PACK_STRIDE
    all_first, _ = row_keys(row0 // group + offset, left, right, valid)
    _, all_end = row_keys((row0 + rows - 1) // group + offset, left, right, valid)
    for tile in range(tile_first, tile_end):
        key0, key_end = max(tile * tile_n, all_first), min((tile + 1) * tile_n, all_end)
        k, v = k_base + key0 * k_row, v_base + key0 * v_row
        if copy_k:
            gather(k_copy, k, k_row, k_step, key_end - key0, head_dim, dtype, zero)
            k = k_copy
        if copy_v:
            gather(v_copy, v, v_row, v_step, key_end - key0, head_dim_v, dtype, zero)
            v = v_copy
        if packs:
            pack(packed, v, v_stride, key_end - key0, head_dim_v, zero)
        for panel in range(panels):
            first_row = row0 + panel * width
            last_row = min(first_row + width, row0 + rows) - 1
            first_first, first_end = row_keys(first_row // group + offset, left, right, valid)
            last_first, last_end = row_keys(last_row // group + offset, left, right, valid)
            # Keys [first, end) are seen by some row of the panel, [free, cut) by all of them.
            first, end = max(key0, first_first), min(key_end, last_end)
            if end <= first:
                continue
            free = max(first, min(last_first, end))
            cut = max(free, min(first_end, end))
            keys = end - first
            scores(
                s,
                k + (first - key0) * k_stride,
                k_stride,
                q + panel * head_dim * width * size,
                head_dim,
                keys,
                by_rows,
                zero,
            )
            if featured:
                features(
                    s,
                    alibi,
                    keys,
                    first,
                    first_row,
                    last_row + 1 - first_row,
                    width,
                    kv_head,
                    b,
                    offset,
                    plan,
                    pointers,
                    zero,
                )
            if free > first or cut < end:
                for r in range(first_row, last_row + 1):
                    row_first, row_end = row_keys(r // group + offset, left, right, valid)
                    at = s + (r - first_row) * size
                    for key in range(first, min(row_first, end)):
                        store(at, (key - first) * width, kind(-INFINITY))
                    for key in range(max(row_end, first), end):
                        store(at, (key - first) * width, kind(-INFINITY))
            v_first = v + (first - key0) * v_stride
            guarded = False
            if removes:
                guarded = not all_finite(v_first, v_stride, head_dim_v, keys, zero)
            elif free > first or cut < end:
                guarded = not (
                    all_finite(v_first, v_stride, head_dim_v, free - first, zero)
                    and all_finite(v + (cut - key0) * v_stride, v_stride, head_dim_v, end - cut, zero)
                )
            row_m, row_l = m + panel * width * size, l + panel * width * size
            if by_rows:
                for j in range(keys, (keys + lanes(zero) - 1) // lanes(zero) * lanes(zero)):
                    store(s, j, kind(-INFINITY))
                softmax_row(s, keys, scale_log2, row_m, row_l, alpha, zero)
            else:
                softmax_panel(s, keys, scale_log2, row_m, row_l, alpha, zero)
            panel_o = o + panel * head_dim_v * width * size
            if guarded:
                values_guarded(panel_o, alpha, v_first, v_stride, s, keys, head_dim_v, by_rows, zero)
            elif by_rows:
                values_of_row(panel_o, alpha, v_first, v_stride, s, keys, head_dim_v, zero)
            else:
                if packs:
                    column = (key_end - key0) * size
                    values(panel_o, alpha, packed, 0, column, first - key0, s, keys, head_dim_v, zero)
                else:
                    values(panel_o, alpha, v, v_stride, size, first - key0, s, keys, head_dim_v, zero)
    return scale_log2


@inlined
def finish(state, scale_log2, plan, pointers, b, kv_head, row0, rows, zero):
    """Divide by l and write o, and lse where it is wanted, of the rows in state."""
    size = size_of(zero)
    head_dim_v, dtype = load(plan, HEAD_DIM_V, INT), load(plan, DTYPE, INT)
    heads, seqlen_q = load(plan, HEADS, INT), load(plan, SEQLEN_Q, INT)
    group = heads // load(plan, HEADS_KV, INT)
    width = 1 if load(plan, BY_ROWS, INT) else lanes(zero)
    panels = (rows + width - 1) // width
    m = state + panels * head_dim_v * width * size
    for r in range(rows):
        i, head = (row0 + r) // group, kv_head * group + (row0 + r) % group
        total = load(m, panels * width + r, zero)
        factor = type(zero)(1) / total if total != 0 else zero
        source = state + ((r // width) * head_dim_v * width + r % width) * size
        to = load(pointers, 3, INT) + (
            b * load(plan, O_STRIDE, INT) + head * load(plan, O_STRIDE + 1, INT) + i * load(plan, O_STRIDE + 2, INT)
        )
        copy_out(to, load(plan, O_STRIDE + 3, INT), source, width, head_dim_v, dtype, factor, zero)
        if load(plan, RETURN_LSE, INT):
            # In the units the exponentials were taken in, so that both have the same rounding of m.
            lse = float(load(m, r, zero) * scale_log2) * math.log(2.0) + math.log(float(total))
            if total == 0:
                lse = -INFINITY
            store(load(pointers, 4, INT), (b * heads + head) * seqlen_q + i, type(zero)(lse))


@inlined
def join(parts, part_size, chunks, scale_log2, rows, panels, width, head_dim_v, zero):
    """Add the states of all chunks into the first: exact, for each is weighted by 2^(c * (m - m of all))."""
    size = size_of(zero)
    at_m = panels * head_dim_v * width
    for r in range(rows):
        best = load(parts, at_m + r, zero)
        for chunk in range(1, chunks):
            best = max(best, load(parts + chunk * part_size, at_m + r, zero))
        if best == -INFINITY:
            continue
        total = zero
        at = (r // width) * head_dim_v * width + r % width
        for chunk in range(chunks):
            part = parts + chunk * part_size
            m = load(part, at_m + r, zero)
            weight = zero
            if m != -INFINITY:
                weight = type(zero)(2.0 ** (float(m * scale_log2) - float(best * scale_log2)))
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
    plan = load(frame, PLAN, INT)
    pointers = frame + POINTERS * 8
    heads_kv, chunks = load(plan, HEADS_KV, INT), load(plan, CHUNKS, INT)
    tile_m, tile_n = load(plan, TILE_M, INT), load(plan, TILE_N, INT)
    group = load(plan, HEADS, INT) // heads_kv
    chunk, group_of_rows = task % chunks, task // chunks
    units = load(plan, BATCH, INT) * heads_kv
    b, kv_head = (group_of_rows % units) // heads_kv, (group_of_rows % units) % heads_kv
    row0 = (load(plan, TILES, INT) - 1 - group_of_rows // units) * tile_m
    rows = min(tile_m, load(plan, SEQLEN_Q, INT) * group - row0)

    valid, length = load(plan, SEQLEN_K, INT), INT
    if load(plan, HAS_SEQLENS_K, INT):
        length = np.int64(load(load(pointers, 8, INT), b * load(plan, SEQLENS_K_STRIDE, INT), np.int32(0)))
        valid = min(max(length, 0), valid)
    offset, source = load(plan, Q_OFFSET, INT), load(plan, Q_OFFSET_SOURCE, INT)
    if source == 1:
        offset += length
    elif source == 2:
        offset += np.int64(load(load(pointers, 9, INT), b * load(plan, Q_OFFSET_STRIDE, INT), np.int32(0)))

    left, right = load(plan, LEFT, INT), load(plan, RIGHT, INT)
    first_first, first_end = row_keys(row0 // group + offset, left, right, valid)
    last_first, last_end = row_keys((row0 + rows - 1) // group + offset, left, right, valid)
    begin, _, _, end = key_tiles(first_first, first_end, last_first, last_end, tile_n)

    state, work = scratch, scratch + load(plan, STATE_BYTES, INT)
    parts = load(frame, PARTS, INT) + group_of_rows * chunks * load(plan, STATE_BYTES, INT)
    if chunks > 1:
        chunk_tiles = load(plan, CHUNK_TILES, INT)
        begin, end = max(begin, chunk * chunk_tiles), min(end, (chunk + 1) * chunk_tiles)
        state = parts + chunk * load(plan, STATE_BYTES, INT)
    scale_log2 = attend(state, work, plan, pointers, b, kv_head, row0, rows, begin, end, valid, offset, zero)
    if chunks > 1:
        if fetch_add(load(frame, COUNTERS, INT) + (1 + group_of_rows) * 8) != chunks - 1:
            return
        width = 1 if load(plan, BY_ROWS, INT) else lanes(zero)
        panels = (rows + width - 1) // width
        head_dim_v = load(plan, HEAD_DIM_V, INT)
        join(parts, load(plan, STATE_BYTES, INT), chunks, scale_log2, rows, panels, width, head_dim_v, zero)
        state = parts
    finish(state, scale_log2, plan, pointers, b, kv_head, row0, rows, zero)


def run_tasks_float32(frame, first, scratch):
    """Run task `first`, then as many as the shared counter hands out."""
    task, tasks = first, load(load(frame, PLAN, INT), TASKS, INT)
    while task < tasks:
        run_task(task, frame, scratch, np.float32(0))
        task = fetch_add(load(frame, COUNTERS, INT))


def run_tasks_float64(frame, first, scratch):
    """The same in double precision."""
    task, tasks = first, load(load(frame, PLAN, INT), TASKS, INT)
    while task < tasks:
        run_task(task, frame, scratch, np.float64(0))
        task = fetch_add(load(frame, COUNTERS, INT))
