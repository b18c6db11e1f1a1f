"""Where the bits of a mask lie (kernels/score/mask_bits.py), or those of a mask_mod (mask_mod_bits.py there), and which
mask_mod is read as bits."""

from ..problem.forward import Problem

MASK_PIECE, MASK_ENDS = 16, 4  # rows of a piece, and the words before them
MOST_WORDS = 1 << 23  # of a mask_mod's bits, 32 MiB: 16384 queries and keys that all batch entries and heads share


LONG = 12  # operations of a mask_mod that take longer, for all heads, than a kernel that writes bits before


def is_read_as_bits(p: Problem) -> bool:
    """Whether kernels that can read a mask_mod as bits do so. Otherwise they call it for each score: where nobody keeps
    the bits of a short function, beside a mask, beside a score_mod, which takes registers, in packed sequences, and
    where there would be too many bits. Without a block_mask documents take 3 to 7 % longer by bits, a neighbourhood of
    13 x 13 58 % of the time (H200)."""
    function = p.function("mask_mod")
    if function is None or len(p.functions) > 1 or p.array("mask") is not None or p.packed is not None:
        return False
    from ..functions.expression import length  # loads the reader of functions

    pays = p.kept or length(function, tuple(len(x.shape) for x in p.aux)) > LONG
    pieces, (*_, row_words) = layout(p)
    return pays and pieces * MASK_PIECE * row_words <= MOST_WORDS


def layout(p: Problem, of_keys: bool = False) -> tuple[int, tuple[int, int, int, int]]:
    """-> (number of pieces, the strides by which they are read: batch, head, piece, row), in words."""
    mask = p.array("mask")
    if (mask is None and p.function("mask_mod") is None) or p.batch == 0:  # an empty batch has an empty mask
        return 0, (0, 0, 0, 0)
    varies: tuple[int, ...]
    if mask is not None:
        varies, by_row = mask.strides[:2], mask.strides[3 if of_keys else 2]
    else:
        from .tile_states import differ  # loads the reader of functions

        varies, by_row = differ(p), 1
    rows, columns = (p.seqlen_k, p.seqlen_q) if of_keys else (p.seqlen_q, p.seqlen_k)
    row_words = -(-columns // 128) * 4
    pieces = -(-rows // MASK_PIECE) if by_row or not rows else 1  # without rows there is nothing to read
    piece = MASK_PIECE * row_words + MASK_ENDS
    batch, heads = (extent if by else 1 for extent, by in zip((p.batch, p.heads), varies, strict=True))
    apart = (heads * pieces * piece, pieces * piece, piece)
    by_batch, by_head, by_piece = (step if by else 0 for step, by in zip(apart, (*varies, by_row), strict=True))
    return batch * heads * pieces, (by_batch, by_head, by_piece, row_words)


def words(p: Problem, of_keys: bool = False) -> int:
    """Number of words of all bits."""
    pieces, (*_, row_words) = layout(p, of_keys)
    return pieces * (MASK_PIECE * row_words + MASK_ENDS)
