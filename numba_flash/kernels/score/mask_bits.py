"""A bool mask as bits, in the order in which tensor-core kernels hold scores. This kernel runs once, before them.

Kernels that read the mask itself would read two bytes of every eight, with arbitrary strides. As bits, a lane's 32
scores of 128 columns are one word, whatever the mask's strides are. If the mask is broadcast, so are the bits: those of
key padding take a few hundred bytes.

The bits lie in pieces of 16 rows, each of ENDS + PIECE * row_words words. A row has four words for 128 columns: bit 2 *
n + i of word c is column 8 * n + 2 * c + i, which the lanes with lane % 4 == c hold (ptx/fragments.py). Two ranges
[first, end) of columns precede the rows. Outside the first one no row of the piece sees a column, so tiles there are
left out. Inside the second one every row sees every column, so tiles there need no mask: it goes from the first column
that all rows see to the next one that some do not. With key padding the two ranges are equal.

    row's first word = b * strides[0] + h * strides[1] + row // 16 * strides[2] + ENDS + row % 16 * row_words

Rows are queries and columns keys, or with config.of_keys the other way around. A lane has four columns of 128 and reads
16 rows of them: a word for the four columns if columns are adjacent in memory, 4 or 16 bytes for the rows if rows are,
and otherwise byte by byte. A warp has a run of columns, so that it knows its own range. As many warps share a piece as
have columns there, so a block may have several pieces.

With config.waits the kernel in front of it, with which it has nothing to do, may still run while it reads
(ptx/griddepcontrol.py).

Launch: grid (pieces / those of a block, rounded up), block (config.threads).
"""

from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from ...ptx import bits, griddepcontrol, local, memory, shfl, special
from ..steps.basics import divide, inlined
from ..steps.bit_exchange import exchange

PIECE, ENDS = 16, 4  # rows of a piece; words before them
SEEN_BY_SOME, SEEN_BY_ALL = 0, 2  # offsets of the ranges
ALL_ROWS, EVERY_SECOND = uint32(0xFFFF), uint32(0x55555555)
BY_WORDS, BY_ROWS, BY_BYTES = 0, 1, 2  # how a piece is read
ROWS_AT_A_TIME = 4  # so many rows are loaded before any byte is tested


class Piece(NamedTuple):
    """Where in the mask 16 rows begin, and how they lie there."""

    at: Any  # index of the first row's first column, int64
    row_stride: Any  # in bytes, as column_stride
    column_stride: Any
    columns: Any
    rows: Any  # a bit for each row that exists


@inlined
def _nonzero_bytes(word):
    """-> bit 8 * n: whether byte n of a word is not 0."""
    return ((word & uint32(0x7F7F7F7F)) + uint32(0x7F7F7F7F) | word) >> uint32(7) & uint32(0x01010101)


def make(config):
    warps, of_keys = config.threads // 32, config.of_keys
    ends_of_warps = 5 * warps

    @inlined
    def pieces_of(strides, sizes):
        """-> (pieces of a head, heads, batch entries)."""
        rows, row_stride = (sizes.seqlen_k, strides.mask[3]) if of_keys else (sizes.seqlen_q, strides.mask[2])
        pieces = int32((rows + 15) >> 4) if row_stride != 0 else int32(1)
        heads = int32(sizes.heads) if strides.mask[1] != 0 else int32(1)
        return pieces, heads, int32(sizes.batch) if strides.mask[0] != 0 else int32(1)

    @inlined
    def piece_of(number, pieces, heads, strides, sizes):
        rows, columns = (sizes.seqlen_k, sizes.seqlen_q) if of_keys else (sizes.seqlen_q, sizes.seqlen_k)
        row_stride, column_stride = strides.mask[2], strides.mask[3]
        if of_keys:
            row_stride, column_stride = strides.mask[3], strides.mask[2]
        head = divide(number, pieces)
        b = divide(head, heads)
        h, first_row = int32(head - b * heads), int32(number - head * pieces) * PIECE
        at = b * strides.mask[0] + h * strides.mask[1] + first_row * row_stride
        left = min(int64(rows - first_row), int64(PIECE)) if row_stride != 0 else int64(PIECE)
        there = uint32((uint32(1) << uint32(left)) - uint32(1))
        return Piece(int64(at), row_stride, column_stride, int32(columns), there)

    @inlined
    def way_of(piece, place):
        """How to read a Piece. place: its address."""
        way = int32(BY_BYTES)
        if piece.column_stride == 1 and (place | piece.row_stride) & 3 == 0:
            way = int32(BY_WORDS)
        elif piece.row_stride == 1 and (place | piece.column_stride) & 3 == 0 and bits.count(piece.rows) & 3 == 0:
            way = int32(BY_ROWS)
        return way

    @inlined
    def read_words(seen, column, piece, place):
        """seen[x] bit 2 * r + i <- whether row r sees column + 2 * x + i. Columns past the end are not read."""
        words = local.array(8, uint32)
        rows, at = piece.rows if column < piece.columns else uint32(0), place + int64(column)
        for x in range(2):  # first each for 8 rows: two columns in the low half of a word, two in the high half
            for r in range(8):
                words[r] = memory.load_b32_if(at, rows >> uint32(8 * x + r) & uint32(1))
                at += piece.row_stride
            seen[x] = uint32(0)
            for r in range(8):
                four = _nonzero_bytes(words[r])
                seen[x] |= ((four | four >> uint32(7)) & uint32(0x00030003)) << uint32(2 * r)
        low, high = seen[0], seen[1]
        seen[0] = low & uint32(0xFFFF) | high << uint32(16)
        seen[1] = low >> uint32(16) | high & uint32(0xFFFF0000)

    @inlined
    def read_rows(seen, column, piece, place):
        """Likewise, with the rows of a column in 16 bytes."""
        words = local.array(16, uint32)
        if (place | piece.column_stride) & 15 == 0 and piece.rows == ALL_ROWS:
            for k in range(4):
                at = place + int64(column + k) * piece.column_stride
                memory.load_v4_if(words, 4 * k, at, uint32(column + k < piece.columns))
        else:
            for k in range(4):
                at = place + int64(column + k) * piece.column_stride
                rows = piece.rows if column + k < piece.columns else uint32(0)
                for four in range(4):
                    words[4 * k + four] = memory.load_b32_if(at + 4 * four, rows >> uint32(4 * four) & uint32(1))
        for x in range(2):
            seen[x] = uint32(0)
            for i in range(2):
                for four in range(4):  # the product moves bit 8 * n to 24 + 2 * n
                    moved = uint32(_nonzero_bytes(words[8 * x + 4 * i + four]) * uint32(0x01041040)) >> uint32(24)
                    seen[x] |= (moved & uint32(0x55)) << uint32(8 * four + i)

    @inlined
    def of_columns(x, column, piece):
        """Which of the columns column + 2 * x + i exist: bit i."""
        return uint32((uint32(1) << uint32(min(max(int32(piece.columns - column - 2 * x), 0), 2))) - uint32(1))

    @inlined
    def read_bytes(seen, column, piece, mask):
        """Likewise, byte by byte. Rows and columns past the end are read from the last ones, so that no load waits for
        a branch."""
        seen[0], seen[1] = uint32(0), uint32(0)
        last, last_column = int32(bits.count(piece.rows) - 1), int32(piece.columns - 1)
        for first in range(0, last + 1, ROWS_AT_A_TIME):
            for i in range(ROWS_AT_A_TIME):
                row = piece.at + min(int32(first + i), last) * piece.row_stride
                for k in range(4):
                    byte = mask[row + min(int32(column + k), last_column) * piece.column_stride]
                    seen[k // 2] |= uint32(byte != 0) << uint32(2 * (first + i) + k % 2)
        for x in range(2):
            seen[x] &= (EVERY_SECOND >> uint32(30 - 2 * last)) * of_columns(x, column, piece)

    @inlined
    def write(seen, lane, found, at):
        """The bits of 128 columns: found[at] is the first row's first word, found[at + row_words] the second row's.
        Rows and the lanes' columns change places, so that two lanes have a row, each two words of it."""
        for x in range(2):
            word = exchange(seen[x], lane & int32(2), 2, 0xCCCCCCCC, 2)
            word = exchange(word, lane & int32(4), 4, 0xF0F0F0F0, 4)
            word = exchange(word, lane & int32(8), 8, 0xFF00FF00, 8)
            word = exchange(word, lane & int32(16), 16, 0xFFFF0000, 16)
            found[at + 2 * (lane & int32(1)) + x] = word

    @inlined
    def rows_of(seen, k):
        """The rows that see the lane's k-th column: bit 2 * r for row r."""
        return seen[k // 2] >> uint32(k % 2) & EVERY_SECOND

    @inlined
    def first_whole(seen, column, piece, every_row):
        """The first of the lane's columns that all rows see; piece.columns if there is none."""
        first = int32(piece.columns)
        for k in range(4):
            if rows_of(seen, k) == every_row:
                first = min(first, int32(column + k))
        return first

    @inlined
    def first_of_warp(column):
        for distance in (1, 2, 4, 8, 16):
            column = min(column, int32(shfl.bfly_b32(uint32(column), distance)))
        return column

    @cuda.jit
    def mask_bits(arrays, strides, sizes):
        if config.waits:
            griddepcontrol.launch_dependents()
        thread = special.thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        pieces, heads, batch = pieces_of(strides, sizes)
        groups = int32(int32((sizes.seqlen_q if of_keys else sizes.seqlen_k) + 127) >> int32(7))
        sharing = max(min(groups, int32(warps)), int32(1))  # warps of a piece
        in_block = divide(warps, sharing)
        own = divide(warp, sharing)
        first_warp = int32(own * sharing)
        number = int32(special.block_index() * in_block + own)
        there = own < in_block and number < pieces * heads * batch
        piece = piece_of(number if there else int32(0), pieces, heads, strides, sizes)
        columns, place = piece.columns, memory.address(arrays.mask, piece.at)
        found = arrays.mask_bits_of_keys if of_keys else arrays.mask_bits
        way, row_words = way_of(piece, place), int64(groups) << 2
        to = int64(number) * (PIECE * row_words + ENDS)
        ends = cuda.shared.array(ends_of_warps, int32)
        seen = local.array(2, uint32)
        every_row = EVERY_SECOND >> uint32(32 - 2 * bits.count(piece.rows))
        first, end = int32(columns), int32(0)
        # The warp's first column that all rows see, the next that some row does not see, and the first of that kind.
        whole_first, whole_end, cut_first = int32(columns), int32(columns), int32(columns)
        of_warp = divide(groups + sharing - int32(1), sharing)
        begin = int32((warp - first_warp) * of_warp)
        for group in range(begin, min(int32(begin + of_warp), groups) if there else begin):
            column = int32(group * 128 + 4 * lane)
            if way == BY_WORDS and (group * 128 + 128 <= columns or columns & int32(3) == 0):
                read_words(seen, column, piece, place)
            elif way == BY_ROWS:
                read_rows(seen, column, piece, place)
            else:
                read_bytes(seen, column, piece, arrays.mask)
            if config.waits:
                griddepcontrol.wait()
            write(seen, lane, found, to + ENDS + int64(lane >> int32(1)) * row_words + int64(group) * 4)
            if whole_first == columns:
                whole_first = first_of_warp(first_whole(seen, column, piece, every_row))
            for k in range(4):  # no row sees a column past the end, and the minimum with that changes nothing
                own, rows = int32(column + k), rows_of(seen, k)
                first = min(first, own) if rows != 0 else first
                end = int32(own + 1) if rows != 0 else end
                cut_first = min(cut_first, own) if rows != every_row else cut_first
                whole_end = min(whole_end, own) if rows != every_row and own > whole_first else whole_end
        first, end, cut_first = first_of_warp(first), -first_of_warp(-end), first_of_warp(cut_first)
        whole_end = first_of_warp(whole_end)
        if lane == 0:
            ends[5 * warp], ends[5 * warp + 1], ends[5 * warp + 2] = first, end, cut_first
            ends[5 * warp + 3], ends[5 * warp + 4] = whole_first, whole_end
        if config.waits:
            griddepcontrol.wait()  # warps without columns, too: the kernel behind waits for this one alone
        cuda.syncthreads()
        if there and lane == 0 and warp == first_warp:
            whole_first, whole_end = int32(columns), int32(columns)
            for other in range(first_warp, first_warp + sharing):
                first, end = min(first, ends[5 * other]), max(end, ends[5 * other + 1])
                if whole_first == columns:
                    whole_first, whole_end = ends[5 * other + 3], ends[5 * other + 4]
                else:
                    whole_end = min(whole_end, ends[5 * other + 2])
            found[to + SEEN_BY_SOME], found[to + SEEN_BY_SOME + 1] = uint32(first), uint32(end)
            found[to + SEEN_BY_ALL], found[to + SEEN_BY_ALL + 1] = uint32(whole_first), uint32(whole_end)

    return mask_bits
