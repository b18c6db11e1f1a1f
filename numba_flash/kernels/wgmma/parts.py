"""float32 as three bfloat16 parts, for tensor cores with 16-bit operands: as exact as float32 arithmetic.

bfloat16 has 8 of float32's 24 significant bits, and the same exponents. So a number is the sum of three parts. Each is
what the parts before it left over, rounded to nearest:

    a . b = a2 . b0 + a1 . b1 + a0 . b2 + a1 . b0 + a0 . b1 + a0 . b0

Three products are left out. Together they are at most 2^-24 of a * b, and as likely positive as negative. Three
products of two tf32 parts (kernels/mma/products_float32.py) take as long, but each number takes 8 bytes instead of 6,
and V would have to be transposed, because wgmma reads V as it lies in memory only in 16 bits.

A tensor core truncates what does not fit its sum, always towards zero, so a long sum in one accumulator drifts (Ootomo
and Yokota, 2022). Here a sum in an accumulator has at most 64 columns, or 64 keys, the small products first. Ordinary
additions, which round to nearest, add up these sums.

Inf, and what bfloat16 rounds up to Inf, cannot be split: Inf - Inf is NaN. Then O is NaN, and the row is computed again
without tensor cores (kernels/recompute/rows.py).
"""

import numpy as np
from numba import float32, int32, int64, uint32

from ...ptx import cvt, ld_st, memory, wgmma
from ..steps.basics import inlined, named, panel_offset

# Pairs of parts that are multiplied, the smallest products first.
PRODUCTS = ((2, 0), (1, 1), (0, 2), (1, 0), (0, 1), (0, 0))


@inlined
def rest_of_low(x, two):
    """x minus the bfloat16 in bits 0 to 15 of `two`."""
    return float32(x - uint32(two << uint32(16)).view(np.float32))


@inlined
def rest_of_high(x, two):
    """x minus the bfloat16 in bits 16 to 31 of `two`."""
    return float32(x - uint32(two & uint32(0xFFFF0000)).view(np.float32))


@inlined
def split_two(low, high):
    """-> the three parts of two numbers, each two in a register."""
    first = cvt.pack_bf16x2(low, high)
    low, high = rest_of_low(low, first), rest_of_high(high, first)
    second = cvt.pack_bf16x2(low, high)
    return first, second, cvt.pack_bf16x2(rest_of_low(low, second), rest_of_high(high, second))


def to_operand(tile_n):
    """-> to_p(acc_s, p_frag), a device function: p_frag (3, tile_n / 8, 2) <- the parts of acc_s, the A operand of P
    V."""
    count = tile_n // 4

    @inlined
    def to_p(acc_s, p_frag):
        for i in range(count):
            p_frag[i], p_frag[count + i], p_frag[2 * count + i] = split_two(acc_s[2 * i], acc_s[2 * i + 1])

    return to_p


def product_of_rows(n, steps, a, b):
    """-> multiply(acc, a, b), a device function: A B^T over 16 columns for each of `steps` in a panel of two tiles in
    parts; n: rows of B. a, b: (where the panel begins in the first part, bytes of a part)."""
    of_a = tuple((a[0] + i * a[1] + x * 32) >> 4 for i, _ in PRODUCTS for x in steps)
    of_b = tuple((b[0] + j * b[1] + x * 32) >> 4 for _, j in PRODUCTS for x in steps)
    return wgmma.new_product_shared(n, "bf16", of_a, of_b, 0)


def product_of_registers(n, rows, b):
    """-> multiply(acc, frag, b), a device function: A, in registers, times n columns of a tile B of `rows` rows. b: as
    above."""
    steps = range(rows // 16)
    of_a = tuple(i * rows // 4 + 4 * y for i, _ in PRODUCTS for y in steps)
    of_b = tuple((b[0] + j * b[1] + y * 16 * 128) >> 4 for _, j in PRODUCTS for y in steps)
    return wgmma.new_product_registers(n, "bf16", of_a, of_b, 1)


def loader(rows, columns, panel_columns, panel_bytes, part_bytes, group=1):
    """-> device functions by which the 128 threads of a warpgroup load float32 rows from global memory, `fetch`, and
    write their parts to shared memory, `store`. raw (words,), two (2,): work space.

    A part has panels of panel_columns columns, panel_bytes apart, in swizzled rows of 128 bytes (ptx/fragments.py).
    Rows and columns that do not exist become zeros and are not read, so NaN in the padding of a cache cannot get in.
    group: rows are that many heads of one query, head_bytes apart.
    """
    # Each of 16 threads has 4 neighbouring columns of a panel's row, and of every eighth row below it. So in shared
    # memory all addresses are a constant away from one, and in global memory one addition gives the next row. Separate
    # offsets would be computed ahead of the loop over tiles and cost two registers each.
    panels, steps = -(-columns // panel_columns), rows // 8
    load_v4, load_b32, store_v2 = memory.load_v4_if, memory.load_b32_if, ld_st.store_v2

    @inlined
    def place_of_row(row, source, row_bytes, head_bytes):
        query = int32(uint32(row) // uint32(group))
        return source + query * row_bytes + (row - query * group) * head_bytes

    @inlined
    def fetch_four(panel, raw, at, place, here, thread):
        """Reads 4 columns of a panel's row, which begins at `place`, if the row exists."""
        within = int32((thread & 15) << 2)
        column = int32(panel * panel_columns + within)
        here = here and (panel_columns == 64 or within < panel_columns)
        place += int64(within * 4) + panel * panel_columns * 4
        if columns % 4 == 0:
            load_v4(raw, at, place, uint32(1) if here and column < columns else uint32(0))
        else:  # the last columns of a row may be missing, and NaN may follow them
            for i in range(4):
                raw[at + i] = load_b32(place + 4 * i, uint32(1) if here and column + i < columns else uint32(0))

    @inlined
    def store_four(step, panel, raw, at, target, two, thread):
        row, piece = thread >> 4, thread & 15
        to = target + panel_offset(row, piece >> 1, rows) + ((piece & 1) << 3) + step * 1024 + panel * panel_bytes
        one = split_two(raw[at].view(np.float32), raw[at + 1].view(np.float32))
        other = split_two(raw[at + 2].view(np.float32), raw[at + 3].view(np.float32))
        two[0], two[1] = one[0], other[0]
        store_v2(to, two, 0)
        two[0], two[1] = one[1], other[1]
        store_v2(to + part_bytes, two, 0)
        two[0], two[1] = one[2], other[2]
        store_v2(to + 2 * part_bytes, two, 0)

    # Each four is a function of its own: the compiler does not unroll a loop over all of them, and `raw` would lie in
    # memory.
    def fetching(before, step, panel, at):
        @inlined
        def fetch(raw, source, row_bytes, head_bytes, first_row, rows_left, thread):
            place = before(raw, source, row_bytes, head_bytes, first_row, rows_left, thread)
            row = int32(first_row + (thread >> 4) + 8 * step)
            if panel == 0 and (step == 0 or group > 1):
                place = place_of_row(row, source, row_bytes, head_bytes)
            elif panel == 0:
                place += 8 * row_bytes
            fetch_four(panel, raw, at, place, int32(uint32(row) // uint32(group)) < rows_left, thread)
            return place

        return fetch

    def storing(before, step, panel, at):
        @inlined
        def store(raw, target, two, thread):
            before(raw, target, two, thread)
            store_four(step, panel, raw, at, target, two, thread)

        return store

    @inlined
    def fetch(raw, source, row_bytes, head_bytes, first_row, rows_left, thread):
        """raw <- the rows from first_row on. `source` is the address of row 0; rows_left: number of queries that
        exist."""
        return source

    @inlined
    def store(raw, target, two, thread):
        """Writes the parts of raw to `target`."""

    for step in range(steps):
        for panel in range(panels):
            place = np.int32(step), np.int32(panel), np.int32(4 * (step * panels + panel))
            fetch, store = fetching(fetch, *place), storing(store, *place)
    return named(fetch, store, words=4 * steps * panels)
