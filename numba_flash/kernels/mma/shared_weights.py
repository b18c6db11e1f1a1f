"""P^T and dS^T of a tile in shared memory, (keys, queries) each, where every warp of a block takes what it multiplies.

Lanes read single numbers, of a row and of a column of every other key. Of two neighbouring queries lanes 2 and 3 of
each four read the odd one first, as they do with the rows that these are multiplied with (`odd_rows_first` in
products_float64.py). So 16 lanes read from different banks. Chunks of 16 bytes trade places within each 128 bytes: the
chunk's number is XORed with bits 1 and 2 of the key's, and its bit 2 with the key's bit 0. So 8 pairs of two
neighbouring keys lie in different banks, and so do 4 queries of keys 0, 2, 4 and 6.
"""

from numba import float64, int32

from ...ptx import ld_st, local
from ..steps.basics import first_column_of, first_row_of, inlined, named


def make(pitch, strips):
    """pitch: bytes from a key to the next, a multiple of 128. `at`: an address that a place function returned, some
    rows and columns further."""

    @inlined
    def place(lane, smem):
        """The address of the lane's first pair in an accumulator."""
        row = int32(first_row_of(lane))
        chunk = (lane & 3) ^ (row & 6) ^ ((row & 1) << 2)
        return int32(smem + row * pitch + (chunk << 4))

    @inlined
    def moved(at, n):
        """-> the address 8 * n columns further."""
        return int32((at ^ int32((n & 1) << 6)) + (n >> 1) * 128)

    @inlined
    def pair(values, at):
        ld_st.load_v2_f64(values, 0, at)

    @inlined
    def put(x, y, at):
        values = local.array(2, float64)
        values[0], values[1] = x, y
        ld_st.store_v2_f64(at, values, 0)

    @inlined
    def operand_place(lane, smem):
        return int32(place(lane, smem) + ((lane & 2) << 2))

    @inlined
    def operand(p_frag, at):
        """p_frag (strips, 2, 4) <- 16 columns of P^T or dS^T as an operand."""
        for strip in range(strips):
            for i in range(4):
                for r in range(2):
                    moved_at = at ^ int32(((i >> 1) << 6) + ((i & 1) << 3))
                    p_frag[strip * 8 + 2 * i + r] = ld_st.load_f64(int32(moved_at + (strip * 16 + 8 * r) * pitch))

    @inlined
    def turned_place(lane, smem):
        row, key = int32(first_row_of(lane)), int32(first_column_of(lane))
        return int32(smem + key * pitch + (((row >> 1) ^ key) << 4) + ((row & 1) << 3))

    @inlined
    def turned(p_frag, at):
        """p_frag (2, 4) <- 16 rows of dS^T, as columns of an operand of 16 queries."""
        for n in range(2):
            for x in range(2):
                for r in range(2):
                    there = int32((at ^ int32((x ^ r) << 6)) + (8 * n + x) * pitch)
                    p_frag[4 * n + 2 * x + r] = ld_st.load_f64(there)

    return named(place, moved, pair, put, operand_place, operand, turned_place, turned)
