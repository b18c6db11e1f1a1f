"""The online softmax on a warp's accumulators: one FFMA and one ex2 a score, row sums kept per lane.

A row's scores lie in the four lanes of a quad; only its maximum has to be the same in all of them in every
tile, so only that is exchanged. Sums stay what each lane has added up and are put together once, at the
end. Exponents are of 2: with m the running maximum of q . k, p = 2^(s * scale_log2 - m * scale_log2).

With config.lag m may be behind the true maximum by that many powers of two, so that p is at most 2^lag. The result is
the same, since O and l have the same factor, and nothing comes near the ends of float16's or float32's range. But then
almost every tile leaves m as it is, and needs neither an exchange between lanes nor O multiplied by alpha = 1 (a
thought of FlashAttention-4's).
"""

import math

from numba import cuda, float32, uint32

from ...ptx import approx, cvt, minmax, shfl, vote
from .inlined import inlined

LN_2 = 0.6931471805599453


def make(config, strips):
    """-> (start, update, to_p, finish), device functions. Rows as in steps/fragment_scores."""
    blocks = config.tile_n // 8
    rows = 2 * strips
    lag, scaled = float32(config.lag), config.scaled  # then the scores are in units of log2(e) already
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    ex2, lg2, rcp = approx.ex2, approx.lg2, approx.rcp
    maximum, bfly, any_lane = minmax.maximum, shfl.bfly_f32, vote.any_lane
    minus_inf = float32(-math.inf)

    @inlined
    def start(m, l):
        for r in range(rows):
            m[r] = minus_inf
            l[r] = float32(0)

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
    def ahead(top, m, scale_log2):
        """By how many powers of two a score is above m."""
        return top - m if scaled else (top - m) * scale_log2

    @inlined
    def reference(m, may_be_empty):
        """What exponents are counted from."""
        return float32(0) if may_be_empty and m == minus_inf else m

    @inlined
    def move(top, m, l, alpha, scale_log2, may_be_empty):
        """m <- top where it is more than lag above it; alpha, l to match."""
        for r in range(rows):
            old = m[r]
            if lag > 0:
                m[r] = top[r] if ahead(top[r], old, scale_log2) > lag else old
            else:
                m[r] = maximum(top[r], old)
            alpha[r] = ex2(ahead(old, reference(m[r], may_be_empty), scale_log2))
            l[r] *= alpha[r]

    @inlined
    def update(acc_s, m, l, alpha, scale_log2, may_be_empty):
        """acc_s <- p; m, l <- with this tile; alpha (rows,) <- what the older part of O and l is worth.

        may_be_empty, a constant: rows may have seen no key yet, and -inf - -inf would be NaN.
        -> whether some alpha of the warp's is not 1.
        """
        shift = cuda.local.array(rows, float32)
        tops(acc_s, shift)
        moved = uint32(1)
        if lag > 0:
            for r in range(rows):
                alpha[r] = float32(1)
            some = uint32(0)
            for r in range(rows):
                some |= uint32(1) if ahead(shift[r], m[r], scale_log2) > lag else uint32(0)
            moved = any_lane(some)
        if moved != 0:
            exchange(shift)
            move(shift, m, l, alpha, scale_log2, may_be_empty)
        for r in range(rows):
            shift[r] = reference(m[r], may_be_empty)
            if not scaled:
                shift[r] *= scale_log2
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = l[r], float32(0)
            for n in range(blocks):
                at = base + 4 * n
                for i in range(2):
                    x = acc_s[at + i] if scaled else acc_s[at + i] * scale_log2
                    acc_s[at + i] = ex2(x - shift[r])
                if n % 2:
                    odd += acc_s[at] + acc_s[at + 1]
                else:
                    even += acc_s[at] + acc_s[at + 1]
            l[r] = even + odd
        return moved

    @inlined
    def to_p(acc_s, p_frag):
        """p_frag (strips, tile_n / 8, 2) <- acc_s in 16 bits: the A operand of P . V."""
        for i in range(strips * blocks * 2):
            p_frag[i] = pack(acc_s[2 * i], acc_s[2 * i + 1])

    @inlined
    def finish(m, l, alpha, lse_log2, scale_log2):
        """l <- sums of whole rows; alpha (rows,) <- 1 / l, or 0; lse_log2 (rows,) <- log2 of the sum of exponentials.

        A row without keys has 0 and -inf.
        """
        for r in range(rows):  # all rows before what needs them: an exchange takes a while
            l[r] += bfly(l[r], 1)
        for r in range(rows):
            l[r] += bfly(l[r], 2)
        for r in range(rows):
            empty = l[r] == float32(0)
            alpha[r] = float32(0) if empty else rcp(l[r])
            top = m[r] if scaled else m[r] * scale_log2
            lse_log2[r] = minus_inf if empty else top + lg2(l[r])

    return start, update, to_p, finish
