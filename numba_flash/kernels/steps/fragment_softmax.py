"""The online softmax on a warp's accumulators: one FFMA and one ex2 a score, row sums kept per lane. In float64 alike.

A row's scores lie in the four lanes of a quad; only its maximum has to be the same in all of them in every
tile, so only that is exchanged. Sums stay what each lane has added up and are put together once, at the
end. Exponents are of 2: with m the running maximum in units of log2(e), p = 2^(s * scale_log2 - m).

With config.rescale_threshold m may be behind the true maximum by that many powers of two, so that p is at most
2^rescale_threshold. The result is the same, since O and l have the same factor, and nothing comes near the ends of
float16's or float32's range. But then almost every tile leaves m as it is, and needs neither an exchange between lanes
nor O multiplied by alpha = 1 (a thought of FlashAttention-4's).
"""

from numba import cuda, uint32

from ...ptx import cvt, vote
from ..score import sum_terms
from ..score.fragments import exponential_of
from ..score.stage import exponent_unit
from . import numbers
from .inlined import inlined

LN_2 = 0.6931471805599453


def make(config, strips):
    """-> (start, update, finish), device functions. Rows as in steps/fragment_scores."""
    blocks = config.tile_n // 8
    rows = 2 * strips
    scores_finished = config.scores_finished  # then the scores are in their own units already (score/stage.py)
    natural = exponent_unit(config) == 1.0  # those of rescale_threshold and of lse, too
    real, _, lg2, rcp, maximum, bfly, minus_inf, lowest = numbers.of(config.compute_dtype)
    rescale_threshold = real(config.rescale_threshold * LN_2 if natural else config.rescale_threshold)
    exponential, of_log2 = exponential_of(config), real(LN_2 if natural else 1.0)
    any_lane, has_term = vote.any_lane, sum_terms.make(config) is not None

    @inlined
    def start(m, l):
        for r in range(rows):
            m[r] = lowest  # not -inf: of a row that has seen no score but -inf yet, -inf - m is to be -inf, not NaN
            l[r] = real(0)

    @inlined
    def in_units(s, scale_log2):
        """A score in units of log2(e), or in its own where it has been finished."""
        return s if scores_finished else s * scale_log2

    @inlined
    def tops(acc_s, top):
        """top (rows,) <- the largest score of each row that the lane has."""
        # Two chains a row, as for the sums below: few warps share a scheduler, so what does not wait for each other has
        # to stand side by side.
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = maximum(acc_s[base], acc_s[base + 1]), maximum(acc_s[base + 4], acc_s[base + 5])
            for n in range(2, blocks, 2):
                even = maximum(even, maximum(acc_s[base + 4 * n], acc_s[base + 4 * n + 1]))
                odd = maximum(odd, maximum(acc_s[base + 4 * n + 4], acc_s[base + 4 * n + 5]))
            top[r] = maximum(even, odd)

    @inlined
    def exchange(top):
        """top <- the largest of the quad; all rows before what needs them."""
        for r in range(rows):
            top[r] = maximum(top[r], bfly(top[r], 1))
        for r in range(rows):
            top[r] = maximum(top[r], bfly(top[r], 2))

    @inlined
    def move(top, m, l, alpha, scale_log2):
        """m <- top where it is more than rescale_threshold above it; alpha, l to match."""
        for r in range(rows):
            old, new = m[r], in_units(top[r], scale_log2)
            if rescale_threshold > 0:
                m[r] = new if new - old > rescale_threshold else old
            else:
                m[r] = maximum(new, old)
            alpha[r] = exponential(old - m[r])
            l[r] *= alpha[r]

    @inlined
    def update(acc_s, m, l, alpha, scale_log2):
        """acc_s <- p; m, l <- with this tile; alpha (rows,) <- what the older part of O and l is worth.

        -> whether some alpha of the warp's is not 1.
        """
        top = cuda.local.array(rows, real)
        tops(acc_s, top)
        moved = uint32(1)
        if rescale_threshold > 0:
            for r in range(rows):
                alpha[r] = real(1)
            some = uint32(0)
            for r in range(rows):
                some |= uint32(1) if in_units(top[r], scale_log2) - m[r] > rescale_threshold else uint32(0)
            moved = any_lane(some)
        if moved != 0:
            exchange(top)
            move(top, m, l, alpha, scale_log2)
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = l[r], real(0)
            for n in range(blocks):
                at = base + 4 * n
                for i in range(2):
                    acc_s[at + i] = exponential(in_units(acc_s[at + i], scale_log2) - m[r])
                if n % 2:
                    odd += acc_s[at] + acc_s[at + 1]
                else:
                    even += acc_s[at] + acc_s[at + 1]
            l[r] = even + odd
        return moved

    @inlined
    def finish(m, l, alpha, lse):
        """l <- sums of whole rows; alpha (rows,) <- 1 / l, or 0; lse (rows,) <- log of the sum of exponentials, in the
        scores' units. With a term of the sum that is no key's (kernels/score/sum_terms.py) lse comes as that.

        A row without keys has 0 and -inf, or that term.
        """
        for r in range(rows):  # all rows before what needs them: an exchange takes a while
            l[r] += bfly(l[r], 1)
        for r in range(rows):
            l[r] += bfly(l[r], 2)
        if has_term:
            for r in range(rows):
                old, m[r] = m[r], maximum(m[r], lse[r])
                alpha[r] = exponential(old - m[r])
                l[r] = l[r] * alpha[r] + exponential(lse[r] - m[r])
        for r in range(rows):
            empty = l[r] == real(0)
            inverse = real(0) if empty else rcp(l[r])
            alpha[r] = alpha[r] * inverse if has_term else inverse
            lse[r] = minus_inf if empty else m[r] + lg2(l[r]) * of_log2

    return start, update, finish


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
