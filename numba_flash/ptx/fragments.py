"""Where things are: which element each register of each lane holds, and how swizzled rows lie in shared memory.

Plain arithmetic on plain ints, as data that the tests check: every map hits every element once. Kernels use
the same facts through `row` and `column`; the stand-ins in sim use the tables.

For mma.m16n8k16 (PTX ISA 9.7.14.5.8) and, a warp of 16 rows at a time, wgmma.m64nNk16 (9.7.15.5.1):

    A  (16 x 16)  register r holds two: row lane // 4 + 8 * (r % 2), columns 2 * (lane % 4) + 8 * (r // 2) and + 1
    B  (16 x 8)   register r holds two: rows 2 * (lane % 4) + 8 * r and + 1, column lane // 4
    C  (16 x 8)   element i: row lane // 4 + 8 * (i // 2), column 2 * (lane % 4) + i % 2

and C of 16 x 8 * n is n of those side by side. So what a lane holds of C, rounded to 16 bits in pairs, is what it
must hold of A: a product's result becomes the next product's operand without leaving its lane.

Of 32- and 64-bit elements a register holds one (mma.m16n8k8 of tf32, m16n8k16 and m8n8k4 of float64; 9.7.14.5.6 and
before), C as above:

    A  (16 x 4 * n)  register r: row lane // 4 + 8 * (r % 2), column lane % 4 + 4 * (r // 2)
    B  (4 * n x 8)   register r: row lane % 4 + 4 * r, column lane // 4

So what a lane holds of C are the elements of A but for the order of columns: what it holds of C's columns
2 * (lane % 4) and the next it must hold of A's columns lane % 4 and lane % 4 + 4. A sum has no order: the next product
takes C's columns in the order of A's, and the rows of B in the same.
"""

LANES = 32


def row(lane):
    """The first of the two rows of C that a lane holds; the other is 8 below."""
    return lane >> 2


def column(lane):
    """The first of the two neighbouring columns of C (16 x 8) that a lane holds."""
    return (lane & 3) << 1


def a_element(lane, index):
    """(row, column) in A (16 x 16) of half `index` (0 to 7) of a lane: register index // 2, low half first."""
    register, half = divmod(index, 2)
    return row(lane) + 8 * (register % 2), column(lane) + 8 * (register // 2) + half


def b_element(lane, index):
    """(row, column) in B (16 x 8) of half `index` (0 to 3) of a lane."""
    register, half = divmod(index, 2)
    return column(lane) + 8 * register + half, row(lane)


def a_word(lane, register):
    """(row, column) in A (16 x 4 * n) of a 32- or 64-bit element."""
    return row(lane) + 8 * (register % 2), (lane & 3) + 4 * (register // 2)


def b_word(lane, register):
    """(row, column) in B (4 * n x 8) of a 32- or 64-bit element."""
    return (lane & 3) + 4 * register, row(lane)


def c_element(lane, index):
    """(row, column) in C (16 x 8 * n) of float32 `index` (0 to 4 * n - 1) of a lane."""
    block, within = divmod(index, 4)
    return row(lane) + 8 * (within // 2), 8 * block + column(lane) + within % 2


def swizzled(offset, swizzle_bytes):
    """Where byte `offset` of a tile of rows of `swizzle_bytes` bytes lies; the tile begins at a multiple of 1024.

    TMA and wgmma exchange 16-byte chunks inside each row so that eight rows of one column lie in different
    banks: the chunk's number is XORed with the number of the 128-byte line. swizzle_bytes: 0, 32, 64 or 128.
    """
    chunks = swizzle_bytes // 16
    if not chunks:
        return offset
    return offset ^ ((offset >> 7) & (chunks - 1)) << 4


def panel_offset(row, chunk, rows):
    """Where 16-byte chunk `chunk` of row `row` lies in a tile of `rows` rows: in panels of 128 bytes a row, swizzled.

    So TMA lays a box of 64 16-bit columns down with the 128-byte swizzle. rows: a multiple of 8.
    """
    return (chunk >> 3) * rows * 128 + row * 128 + (((chunk ^ row) & 7) << 4)


# wgmma's descriptors. A core matrix is 8 rows of 16 bytes. For a tile whose rows are swizzle_bytes wide:
#   k-contiguous (A, and B as K is stored): stride is the distance from 8 rows to the next 8 (8 * swizzle_bytes);
#     leading is not used while a step of 16 stays inside a swizzled row; the next step begins 32 bytes further.
#   n-contiguous (B as V is stored; b_trans = 1): stride is the distance from 8 rows (along k) to the next 8,
#     leading the distance from swizzle_bytes / 2 columns to the next as many; a step is 16 rows further.
