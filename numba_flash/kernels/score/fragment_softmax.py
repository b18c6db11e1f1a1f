"""The online softmax on a warp's accumulators: one FFMA and one ex2 for each score. float64 uses the same code.

It is listing 5 of docs/first_kernels.md, lines 13 to 17 and, at the end, lines 19 and 20.

The four lanes of a quad hold a row's scores. Every tile needs the row's maximum in all four lanes, so only the maximum
is exchanged. Each lane keeps its own sum; `finish` adds up the four. Exponents are powers of 2: with m the running
maximum in log2, p = 2^(s * scale_log2 - m).

With config.rescale_threshold m may be below the true maximum by at most that many powers of two, so p is at most
2^rescale_threshold. The result is the same, since O and l have the same factor, and no number comes near the limits of
float16 or float32. Then almost no tile changes m, so lanes exchange nothing and O is not multiplied by alpha = 1 (an
idea of FlashAttention-4).
"""

from numba import uint32

from ...ptx import cvt, local, vote
from ..steps import numbers
from ..steps.basics import inlined, named
from ..steps.units import LN_2, exponent_unit
from . import sum_term
from .fragments import exponential_of


def make(config, strips, rows=0):
    """-> device functions. rows: how many of its 2 * strips rows a lane has; 0 = all. The other scores are not
    changed."""
    blocks, rows, of = config.tile_n // 8, rows or 2 * strips, numbers.of(config.compute_dtype)
    natural = exponent_unit(config) == 1.0  # rescale_threshold and lse are in the scores' unit, too
    rescale_threshold = of.real(config.rescale_threshold * LN_2 if natural else config.rescale_threshold)
    exponential, of_log2 = exponential_of(config), of.real(LN_2 if natural else 1.0)
    has_term = sum_term.make(config) is not None

    @inlined
    def start(m, l):
        """m, l <- their values before the first tile."""
        for r in range(rows):
            m[r] = of.lowest  # not -inf: if a row has only scores of -inf so far, -inf - m must be -inf, not NaN
            l[r] = of.real(0)

    @inlined
    def in_units(s, factor):
        """A score in log2; a finished score stays in the scores' unit."""
        return s if config.scores_finished else s * factor

    @inlined
    def tops(acc_s, top):
        """top (rows,) <- the largest score that the lane has of each row."""
        # Two chains for each row, as for the sums below: few warps share a scheduler, so independent instructions must
        # be adjacent.
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = of.maximum(acc_s[base], acc_s[base + 1]), of.maximum(acc_s[base + 4], acc_s[base + 5])
            for n in range(2, blocks, 2):
                even = of.maximum(even, of.maximum(acc_s[base + 4 * n], acc_s[base + 4 * n + 1]))
                odd = of.maximum(odd, of.maximum(acc_s[base + 4 * n + 4], acc_s[base + 4 * n + 5]))
            top[r] = of.maximum(even, odd)

    @inlined
    def exchange(top):
        """top <- the maximum over the quad; the exchanges of all rows are issued before their results are used."""
        for r in range(rows):
            top[r] = of.maximum(top[r], of.bfly(top[r], 1))
        for r in range(rows):
            top[r] = of.maximum(top[r], of.bfly(top[r], 2))

    @inlined
    def move(top, m, l, alpha):
        """m <- top if it is more than rescale_threshold larger; updates alpha and l to match."""
        for r in range(rows):
            old, new = m[r], top[r]
            if rescale_threshold > 0:
                m[r] = new if new - old > rescale_threshold else old
            else:
                m[r] = of.maximum(new, old)
            alpha[r] = exponential(old - m[r])
            l[r] *= alpha[r]

    @inlined
    def softmax(acc_s, m, l, alpha, factor):
        """acc_s (strips, tile_n / 8, 4): scores <- weights p; m and l (rows,) <- those with this tile; alpha (rows,) <-
        the factor of the older O and l. A score is multiplied by factor. -> whether some alpha of the warp is not 1."""
        top = local.array(rows, of.real)
        tops(acc_s, top)
        for r in range(rows):
            top[r] = in_units(top[r], factor)
        moved = uint32(1)
        if rescale_threshold > 0:
            for r in range(rows):
                alpha[r] = of.real(1)
            some = uint32(0)
            for r in range(rows):
                some |= uint32(1) if top[r] - m[r] > rescale_threshold else uint32(0)
            moved = vote.any_lane(some)
        if moved != 0:
            exchange(top)
            move(top, m, l, alpha)
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = l[r], of.real(0)
            for n in range(blocks):
                at = base + 4 * n
                for i in range(2):
                    acc_s[at + i] = exponential(in_units(acc_s[at + i], factor) - m[r])
                if n % 2:
                    odd += acc_s[at] + acc_s[at + 1]
                else:
                    even += acc_s[at] + acc_s[at + 1]
            l[r] = even + odd
        return moved

    @inlined
    def finish(m, l, alpha, lse):
        """l <- sums of whole rows; alpha (rows,) <- 1 / l, or 0; lse (rows,) <- log of the sum of exponentials, in the
        scores' unit. With a term of its sum (kernels/score/sum_term.py), lse holds that on entry.

        A row without keys gets 0 and -inf, or its sink.
        """
        for r in range(rows):  # the exchanges of all rows come first: each takes a while
            l[r] += of.bfly(l[r], 1)
        for r in range(rows):
            l[r] += of.bfly(l[r], 2)
        if has_term:
            for r in range(rows):
                old, m[r] = m[r], of.maximum(m[r], lse[r])
                alpha[r] = exponential(old - m[r])
                l[r] = l[r] * alpha[r] + exponential(lse[r] - m[r])
        for r in range(rows):
            empty = l[r] == of.real(0)
            inverse = of.real(0) if empty else of.reciprocal(l[r])
            alpha[r] = alpha[r] * inverse if has_term else inverse
            lse[r] = of.minus_inf if empty else m[r] + of.log2(l[r]) * of_log2

    return named(start, softmax, finish)


def rescaler(strips, blocks, rows=0):
    """-> rescale(acc_o, alpha, moved), a device function: rows of acc_o (strips, blocks, 4) times alpha (2 * strips,),
    if some maximum moved. rows: as of make."""
    count = 2 if rows == strips else 4

    @inlined
    def rescale(acc_o, alpha, moved):
        if moved != 0:
            for strip in range(strips):
                for n in range(blocks):
                    for i in range(count):
                        acc_o[(strip * blocks + n) * 4 + i] *= alpha[strip * 2 + i // 2]

    return rescale


def in_16_bits(config, strips):
    """-> to_p, a device function."""
    count = strips * (config.tile_n // 8) * 2
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2

    @inlined
    def to_p(acc_s, p_frag):
        """p_frag (strips, tile_n / 8, 2) <- acc_s in 16 bits: the A operand of P . V."""
        for i in range(count):
            p_frag[i] = pack(acc_s[2 * i], acc_s[2 * i + 1])

    return to_p
