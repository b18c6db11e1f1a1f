"""P^T and dS^T of a tile in shared memory, (keys, queries) each, where every warp of a block takes what it multiplies.

In float32 the queries of each 8 lie in the order 0, 2, 4, 6, 1, 3, 5, 7. So ldmatrix hands out the operand that
products_float32.py takes, and what lanes write at a time lies in different banks. For the banks' sake rows are 16 bytes
longer than they need be, too.

In float64 lanes read single numbers, of a row and of a column of every other key. Of two neighbouring queries lanes 2
and 3 of each four read the odd one first, as they do with the rows that these are multiplied with (`odd_rows_first` in
products_float64.py). So 16 lanes read from different banks. Chunks of 16 bytes trade places within each 128 bytes: the
chunk's number is XORed with bits 1 and 2 of the key's, and its bit 2 with the key's bit 0. So 8 pairs of two
neighbouring keys lie in different banks, and so do 4 queries of keys 0, 2, 4 and 6.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import float32, float64, int32

from ...ptx import ld_st, ldmatrix, local
from ..steps.inlined import inlined
from ..steps.plain import first_column_of, first_row_of


class SharedWeights(NamedTuple):
    """Device functions. `at`: an address that a place function returned, some rows and columns further."""

    place: Callable[..., Any]  # (lane, smem): of the lane's pair in an accumulator
    moved: Callable[..., Any]  # (at, n): 8 * n columns further
    pair: Callable[..., Any]  # (values, at): values (2,) <- the pair
    put: Callable[..., Any]  # (x, y, at): the pair <- x, y
    operand_place: Callable[..., Any]  # (lane, smem)
    operand: Callable[..., Any]  # (p_frag, at): p_frag (strips, 2, 4) <- 16 columns of P^T or dS^T as an operand
    turned_place: Callable[..., Any]  # (lane, smem)
    turned: Callable[..., Any]  # (p_frag, at): p_frag (2, 4) <- 16 rows of dS^T, as columns of an operand of 16 queries


def make(pitch, strips, double):
    """pitch: elements from a key to the next; in float64 a multiple of 16."""
    load_b32, store_b32, load_f64 = ld_st.load_b32, ld_st.store_b32, ld_st.load_f64

    @inlined
    def place(lane, smem):
        return int32(smem + (int32(first_row_of(lane)) * pitch + (lane & 3)) * 4)

    @inlined
    def place_f64(lane, smem):
        row = int32(first_row_of(lane))
        chunk = (lane & 3) ^ (row & 6) ^ ((row & 1) << 2)
        return int32(smem + row * (pitch * 8) + (chunk << 4))

    @inlined
    def moved(at, n):
        return at + n * 32

    @inlined
    def moved_f64(at, n):
        return int32((at ^ int32((n & 1) << 6)) + (n >> 1) * 128)

    @inlined
    def pair(values, at):
        values[0] = load_b32(at).view(np.float32)
        values[1] = load_b32(at + 16).view(np.float32)

    @inlined
    def pair_f64(values, at):
        ld_st.load_v2_f64(values, 0, at)

    @inlined
    def put(x, y, at):
        store_b32(at, float32(x).view(np.uint32))
        store_b32(at + 16, float32(y).view(np.uint32))

    @inlined
    def put_f64(x, y, at):
        values = local.array(2, float64)
        values[0], values[1] = x, y
        ld_st.store_v2_f64(at, values, 0)

    @inlined
    def operand_place(lane, smem):
        return int32(smem + (lane & 15) * (pitch * 4) + ((lane >> 4) << 4))

    @inlined
    def operand(p_frag, at):
        for strip in range(strips):
            for half in range(2):
                ldmatrix.x4(p_frag, strip * 8 + half * 4, at + (strip * 16 * pitch + half * 8) * 4)

    @inlined
    def operand_place_f64(lane, smem):
        return int32(place_f64(lane, smem) + ((lane & 2) << 2))

    @inlined
    def operand_f64(p_frag, at):
        for strip in range(strips):
            for i in range(4):
                for r in range(2):
                    moved_at = at ^ int32(((i >> 1) << 6) + ((i & 1) << 3))
                    p_frag[strip * 8 + 2 * i + r] = load_f64(int32(moved_at + (strip * 16 + 8 * r) * (pitch * 8)))

    @inlined
    def turned_place(lane, smem):
        row = int32(first_row_of(lane))
        column = ((row & 1) << 2) + (row >> 1)
        return int32(smem + (int32(first_column_of(lane)) * pitch + column) * 4)

    @inlined
    def turned_place_f64(lane, smem):
        row, key = int32(first_row_of(lane)), int32(first_column_of(lane))
        return int32(smem + key * (pitch * 8) + (((row >> 1) ^ key) << 4) + ((row & 1) << 3))

    @inlined
    def turned(p_frag, at):
        for n in range(2):
            for x in range(2):
                for r in range(2):
                    p_frag[4 * n + 2 * x + r] = load_b32(at + ((8 * n + x) * pitch + 8 * r) * 4)

    @inlined
    def turned_f64(p_frag, at):
        for n in range(2):
            for x in range(2):
                for r in range(2):
                    p_frag[4 * n + 2 * x + r] = load_f64(int32((at ^ int32((x ^ r) << 6)) + (8 * n + x) * (pitch * 8)))

    if double:
        ways = place_f64, moved_f64, pair_f64, put_f64, operand_place_f64, operand_f64, turned_place_f64, turned_f64
        return SharedWeights(*ways)
    return SharedWeights(place, moved, pair, put, operand_place, operand, turned_place, turned)
