"""The scores of a tile in a warp's accumulators: the chain of stages finishes, weights and masks them.

acc_s is (strips, tile_n / 8, 4): strips of 16 rows below each other. A lane holds the rows lane // 4 and lane // 4 + 8
of each strip, and two of every eight columns (ptx/fragments.py). So a lane has 2 * strips rows. Row r is element pair
(4 * n + 2 * (r % 2)) of strip r // 2.

Scores are in log2, or with a bias in natural units (kernels/steps/units.py).
"""

import functools
import math

from numba import cuda, int32, int64, uint32

from ...ptx import minmax
from ..steps import elements, numbers
from ..steps.basics import first_column_of, first_row_of, inlined, named
from ..steps.units import LOG2_E, exponent_unit
from . import STAGES, reads
from .stage import FragmentAt


@functools.cache
def chain(config):
    """The stages that the problem uses, in order: device functions. at: a FragmentAt; score: the kernel's numbers;
    row_term: a number that the scores of a row share, if has_row_term, otherwise 0."""
    real = elements.COMPUTE_TYPES[config.dtype]
    one, zero = real(1), real(0)

    @inlined
    def product_alone(product, at, score):
        return product, one, one

    @inlined
    def no_term(b, h, arrays, strides):
        return zero

    run, row_term = product_alone, None
    for stage in STAGES:
        made = stage.on_fragments(config)
        if made is not None:
            run = _then(run, made)
            assert not (row_term and made.row_term), "two stages have a term for each row, and there is place for one"
            row_term = made.row_term or row_term

    @inlined
    def value(product, at, score):
        """-> the score"""
        s, factor, _ = run(product, at, score)
        return s * factor

    @inlined
    def with_derivative(product, at, score):
        """-> (the score, its derivative by scale * product, in natural units)"""
        s, factor, derivative = run(product, at, score)
        return s * factor, derivative

    return named(value, with_derivative, row_term=row_term or no_term, has_row_term=row_term is not None)


def _then(before, stage):
    value, derivative, varies = stage.value, stage.derivative, stage.derivative is not None

    @inlined
    def run(product, at, score):
        s, factor, by_product = before(product, at, score)
        s, factor = value(s, factor, at, score)
        return s, factor, by_product * derivative(s) if varies else by_product

    return run


@functools.cache
def exponential_of(config):
    """e^x of a difference of two scores, in the scores' unit."""
    made = numbers.of(config.compute_dtype)
    ex2, log2_e = made.exp2, made.real(LOG2_E)

    @inlined
    def natural(x):
        return ex2(x * log2_e)

    return ex2 if exponent_unit(config) == LOG2_E else natural


@functools.cache
def weights_at(config):
    """-> (weight, weight_or_zero), device functions: (product, at, score, lse) -> (p, derivative).

    p = e^(score - lse); lse, in the scores' unit, is +inf for a row that sees no key. derivative: as of chain.
    weight_or_zero gives 0 for a score of -inf even if lse is NaN.

    lse is rounded, so with large scores score - lse may be above 0, and e of it anything (docs/numerics.md). In float32
    it is at most 0. In 16 bits that would cost 1.2 % (H200, all gradients), for scores that 16 bits cannot order.
    """
    with_derivative, exponential = chain(config).with_derivative, exponential_of(config)
    real = elements.COMPUTE_TYPES[config.dtype]
    minus_inf, bounded = real(-math.inf), config.dtype == "float32"

    @inlined
    def below_lse(s, lse):
        return minmax.minimum_nan(s - lse, real(0)) if bounded else s - lse

    @inlined
    def weight(product, at, score, lse):
        s, derivative = with_derivative(product, at, score)
        return exponential(below_lse(s, lse)), derivative

    @inlined
    def weight_or_zero(product, at, score, lse):
        s, derivative = with_derivative(product, at, score)
        return exponential(below_lse(s, lse)) if s != minus_inf else real(0), derivative

    return weight, weight_or_zero


@inlined
def columns_below(limit, word):
    """Bits of the lane's columns in 16 blocks of 8, two in each, that are below `limit`, counted from its very first
    column. word: which 16 blocks."""
    here = min(max(int32(limit - 128 * word), int32(0)), int32(128))
    count = int32(((here >> 3) << 1) + min(here & 7, 2))
    return uint32((int64(1) << int64(count)) - int64(1))


@inlined
def columns_within(first, end, word):
    """Likewise for the columns in [first, end)."""
    # These are bits, one for each element of a row: ptxas turns eight at a time into predicates. Comparing each column
    # with both limits takes three instructions.
    return columns_below(end, word) & ~columns_below(first, word)


@inlined
def clamp(x):
    """An int64 as int32; what is beyond every tile stays so."""
    return int32(min(max(x, int64(-(1 << 28))), int64(1 << 28)))


@functools.cache
def tile(config, strips, columns=0):
    """-> device functions for the scores of a tile of config.tile_n columns, or of `columns`, of which a warp has
    `strips` strips of 16 rows; mask_words: uint32 of mask bits for a lane's rows."""
    tile_n, group = columns or config.tile_n, config.group_size
    blocks = tile_n // 8
    words = -(-blocks // 16)
    real = elements.COMPUTE_TYPES[config.dtype]
    minus_inf, value = real(-math.inf), chain(config).value
    added = reads.make(config, strips, columns).added

    @inlined
    def visible(j, first_row, lane, tile_pos, left, right, keys, mask_bits, distance):
        """mask_bits (2 * strips, words) <- bits of those of the lane's columns of tile j that its rows see.

        first_row: the warp's, in the query tile, which begins at position tile_pos. Also sets distance, for `finish`.
        It needs no score, so it can run while the scores are being computed.
        """
        # ranges.row_keys, counted from the tile's first key: after the clamp 32 bits hold every sum.
        tile_key, column = int64(j) * tile_n, int32(first_column_of(lane))
        lowest = clamp(tile_pos - left - tile_key)
        highest = clamp(tile_pos + right + 1 - tile_key)
        keys_left = int32(keys - tile_key)
        for r in range(2 * strips):
            query = int32(uint32(first_row + first_row_of(lane) + r * 8) // uint32(group))
            first = int32(lowest + query - column)
            end = int32(min(int32(highest + query), keys_left) - column)
            for word in range(words):
                mask_bits[r * words + word] = columns_within(first, end, word)
            distance[r] = real(tile_pos + query - tile_key - column)

    @inlined
    def finish(acc_s, terms, distance, loaded, score):
        """acc_s <- finished scores. terms, distance (2 * strips,): of the lane's rows, at its first column; loaded:
        what reads.py has loaded for this tile."""
        for strip in range(strips):
            for n in range(blocks):
                for i in range(4):
                    at = (strip * blocks + n) * 4 + i
                    r = strip * 2 + i // 2
                    row, column = r, n * 8 + i % 2
                    if group == 1:  # a strip's other row is 8 queries below, as far from keys 8 columns on
                        row, column = 2 * strip, column - i // 2 * 8
                    away = cuda.fma(terms[row], real(-column), terms[row] * distance[row])
                    acc_s[at] = value(acc_s[at], FragmentAt(away, added(loaded, r, n, i % 2)), score)

    @inlined
    def mask(acc_s, mask_bits):
        """acc_s <- -inf where `visible` left no bit."""
        for r in range(2 * strips):
            for n in range(blocks):
                for i in range(2):
                    if (mask_bits[r * words + n // 16] >> uint32(2 * (n % 16) + i)) & uint32(1) == 0:
                        acc_s[((r // 2) * blocks + n) * 4 + (r % 2) * 2 + i] = minus_inf

    return named(visible, finish, mask, mask_words=2 * strips * words)
