"""Who holds which element of a tensor core's result

Teaches: mma.m16n8k16 leaves its 16 x 8 result in the registers of 32 lanes, 4 each. A kernel must know who has what.
Minutes: 10
Read: docs/tensor_cores.md, "What a tensor core does"
Solution: numba_flash/ptx/fragments.py

       columns   0 1     2 3     4 5     6 7
    row 0       lane 0  lane 1  lane 2  lane 3      elements 0 and 1 of each lane
    row 1       lane 4  lane 5  lane 6  lane 7
    ...
    row 7       lane 28 lane 29 lane 30 lane 31
    row 8       lane 0  lane 1  lane 2  lane 3      elements 2 and 3
    ...
"""


def row_of(lane, i):
    """The row of element i (0 to 3) of a lane (0 to 31)."""
    return ...


def column_of(lane, i):
    """Its column."""
    return ...
