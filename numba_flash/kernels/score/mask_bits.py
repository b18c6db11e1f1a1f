"""A bool mask as bits, in the order in which tensor-core kernels hold scores. This kernel runs once, before them.

Kernels that read the mask itself would read two bytes of every eight, with arbitrary strides. As bits, a lane's 32
scores of 128 columns are one word, whatever the mask's strides are. If the mask is broadcast, so are the bits: those of
key padding take a few hundred bytes.

The bits lie in pieces of 16 rows, each of ENDS + PIECE * row_words words. A row has four words for 128 columns: bit 2 *
n + i of word c is column 8 * n + 2 * c + i, which the lanes with lane % 4 == c hold (ptx/fragments.py). Two ranges
[first, end) of columns precede the rows. Outside the first one no row of the piece sees a column, so tiles there are
left out. Inside the second one every row sees every column, so tiles there need no mask: a row contributes the columns
from the first one that it sees up to the next one that it does not see. With key padding the two ranges are equal.

    row's first word = b * strides[0] + h * strides[1] + row // 16 * strides[2] + ENDS + row % 16 * row_words

Rows are queries and columns keys, or with config.of_keys the other way around. Launch: grid (pieces), block
(config.threads).
"""

from numba import cuda, int32, int64, uint32

from ...ptx import bits, shfl, special, vote
from ..steps.inlined import inlined
from ..steps.integers import divide

PIECE, ENDS = 16, 4  # rows of a piece; words before them
SEEN_BY_SOME, SEEN_BY_ALL = 0, 2  # offsets of the ranges
AT_ONCE = 4  # words of all four kinds that are read at a time: a read takes a while


@inlined
def _of_queries(arrays):
    return arrays.mask_bits


@inlined
def _of_keys(arrays):
    return arrays.mask_bits_of_keys


def make(config):
    threads, of_keys = config.threads, config.of_keys
    warps, at_once = threads // 32, 4 * AT_ONCE
    four_of_each = 4 * warps
    result = _of_keys if of_keys else _of_queries
    ballot, bfly, highest = vote.ballot, shfl.bfly_b32, bits.highest
    thread_index, block_index = special.thread_index, special.block_index

    @inlined
    def word_of(ballots, c):
        """ballots: of the columns 4 * lane + k, for each k, in four uint32."""
        low, high = ballots[2] if c & 1 else ballots[0], ballots[3] if c & 1 else ballots[1]
        shift, every_second = uint32(c >> 1), uint32(0x55555555)
        return uint32((low >> shift & every_second) | (high >> shift & every_second) << uint32(1))

    @inlined
    def place_of(block, strides, sizes):
        """-> (b, h, piece, rows, columns, the mask's strides of a row and of a column)."""
        rows, columns = (sizes.seqlen_k, sizes.seqlen_q) if of_keys else (sizes.seqlen_q, sizes.seqlen_k)
        row_stride, column_stride = strides.mask[2], strides.mask[3]
        if of_keys:
            row_stride, column_stride = strides.mask[3], strides.mask[2]
        pieces = int32((rows + 15) >> 4) if row_stride != 0 else int32(1)
        heads = int32(sizes.heads) if strides.mask[1] != 0 else int32(1)
        head = divide(block, pieces)
        b = divide(head, heads)
        return b, int32(head - b * heads), int32(block - head * pieces), rows, columns, row_stride, column_stride

    @inlined
    def first_shown(ballots, begin, columns):
        """The first of the 128 columns from `begin` on that is shown; `columns` if none is."""
        first = int32(columns)
        for k in range(4):
            if ballots[k] != 0:
                first = min(first, int32(begin + 4 * highest(ballots[k] & (~ballots[k] + uint32(1))) + k))
        return first

    @cuda.jit
    def mask_bits(arrays, strides, sizes):
        thread = thread_index()
        lane, warp = thread & int32(31), thread >> int32(5)
        b, h, piece, rows, columns, row_stride, column_stride = place_of(block_index(), strides, sizes)
        row_words = int64(((columns + 127) >> 7) << 2)
        to = int64(block_index()) * (PIECE * row_words + ENDS)
        ballots = cuda.local.array(4, uint32)
        seen = cuda.local.array(at_once, uint32)
        ends = cuda.shared.array(four_of_each, int32)
        found = result(arrays)
        first, end = int32(columns), int32(0)
        whole_first, whole_end = int32(0), int32(columns)
        for in_piece in range(warp, PIECE, warps):
            row = int64(piece) * PIECE + in_piece
            base = b * strides.mask[0] + h * strides.mask[1] + row * row_stride
            there, shown_from = row < rows or row_stride == 0, int32(columns)
            for step in range(0, int32(row_words >> 2), AT_ONCE):
                for i in range(at_once):
                    column = int64(step + i // 4) * 128 + 4 * lane + i % 4
                    seen[i] = uint32(0)
                    if column < columns and there:
                        seen[i] = uint32(arrays.mask[base + column * column_stride])
                for part in range(AT_ONCE):
                    begin = int32((step + part) * 128)
                    for k in range(4):
                        ballots[k] = ballot(seen[part * 4 + k])
                    shown_from = min(shown_from, first_shown(ballots, begin, columns))
                    for k in range(4):
                        column = int32(begin + 4 * lane + k)
                        if seen[part * 4 + k] != 0:
                            first, end = min(first, column), max(end, int32(column + 1))
                        elif column > shown_from:
                            whole_end = min(whole_end, column)
                    if lane < 4 and step + part < int32(row_words >> 2):
                        at = to + ENDS + in_piece * row_words + int64(step + part) * 4 + lane
                        found[at] = word_of(ballots, lane)
            if there:
                whole_first = max(whole_first, shown_from)
        for distance in (1, 2, 4, 8, 16):
            first = min(first, int32(bfly(uint32(first), distance)))
            end = max(end, int32(bfly(uint32(end), distance)))
            whole_end = min(whole_end, int32(bfly(uint32(whole_end), distance)))
        if lane == 0:
            ends[4 * warp], ends[4 * warp + 1] = first, end
            ends[4 * warp + 2], ends[4 * warp + 3] = whole_first, whole_end
        cuda.syncthreads()
        if thread == 0:
            for other in range(warps):
                first, end = min(first, ends[4 * other]), max(end, ends[4 * other + 1])
                whole_first, whole_end = max(whole_first, ends[4 * other + 2]), min(whole_end, ends[4 * other + 3])
            found[to + SEEN_BY_SOME], found[to + SEEN_BY_SOME + 1] = uint32(first), uint32(end)
            found[to + SEEN_BY_ALL], found[to + SEEN_BY_ALL + 1] = uint32(whole_first), uint32(whole_end)

    return mask_bits
