"""Swizzled rows: no two in the same banks

Teaches: ldmatrix reads 16 bytes of each of 8 rows at once. In plain rows of 128 bytes these 8 pieces lie in the same 4
    of the 32 banks, and are read one after the other. A swizzle spreads them at no cost of memory.
Minutes: 10
Read: docs/tensor_cores.md, "Shared memory: banks, panels and the swizzle"
Solution: numba_flash/ptx/fragments.py, swizzled; TMA does it in hardware
"""


def place(row, piece):
    """Where piece number `piece` (0 to 7) of a row stands in that row: its place, 0 to 7.

    A row has 8 pieces of 16 bytes, one for each group of 4 banks. Pieces with one number, of 8 rows below each other,
    must stand in 8 different places.
    """
    return ...  # one operator on two numbers, of which one is row % 8
