"""The online softmax on a warp's accumulators: one FFMA and one ex2 a score, row sums kept per lane.

A row's scores lie in the four lanes of a quad; only its maximum has to be the same in all of them in every
tile, so only that is exchanged. Sums stay what each lane has added up and are put together once, at the
end. Exponents are of 2: with m the running maximum of q . k, p = 2^(s * scale_log2 - m * scale_log2).
"""

import math

from numba import cuda, float32

from ...ptx import approx, cvt, minmax, shfl

LN_2 = 0.6931471805599453


def make(config, strips):
    """-> (start, update, to_p, finish), device functions. Rows as in steps/fragment_scores."""
    blocks = config.tile_n // 8
    rows = 2 * strips
    scaled = config.scaled  # then the scores are in units of log2(e) already
    pack = cvt.pack_f16x2 if config.dtype == "float16" else cvt.pack_bf16x2
    ex2, lg2, rcp = approx.ex2, approx.lg2, approx.rcp
    maximum, bfly = minmax.maximum, shfl.bfly_f32
    minus_inf = float32(-math.inf)

    @cuda.jit(device=True, inline="always")
    def start(m, l):
        for r in range(rows):
            m[r] = minus_inf
            l[r] = float32(0)

    @cuda.jit(device=True, inline="always")
    def update(acc_s, m, l, alpha, scale_log2, may_be_empty):
        """acc_s <- p; m, l <- with this tile; alpha (rows,) <- what the older part of O and l is worth.

        may_be_empty, a constant: rows may have seen no key yet, and -inf - -inf would be NaN.
        """
        shift = cuda.local.array(rows, float32)
        # Two chains a row, of maxima and of sums, all rows before anything is exchanged: few warps share a scheduler,
        # so what does not wait for each other has to stand side by side.
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even = maximum(m[r], maximum(acc_s[base], acc_s[base + 1]))
            odd = maximum(acc_s[base + 4], acc_s[base + 5])
            for n in range(2, blocks, 2):
                even = maximum(even, maximum(acc_s[base + 4 * n], acc_s[base + 4 * n + 1]))
                odd = maximum(odd, maximum(acc_s[base + 4 * n + 4], acc_s[base + 4 * n + 5]))
            shift[r] = maximum(even, odd)
        for r in range(rows):
            shift[r] = maximum(shift[r], bfly(shift[r], 1))
        for r in range(rows):
            shift[r] = maximum(shift[r], bfly(shift[r], 2))
        for r in range(rows):
            old = m[r]
            m[r] = shift[r]
            if may_be_empty:
                shift[r] = float32(0) if shift[r] == minus_inf else shift[r]
            if scaled:
                alpha[r] = ex2(old - shift[r])
            else:
                alpha[r] = ex2((old - shift[r]) * scale_log2)
                shift[r] = shift[r] * scale_log2
        for r in range(rows):
            base = (r // 2) * blocks * 4 + (r % 2) * 2
            even, odd = l[r] * alpha[r], float32(0)
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

    @cuda.jit(device=True, inline="always")
    def to_p(acc_s, p_frag):
        """p_frag (strips, tile_n / 8, 2) <- acc_s in 16 bits: the A operand of P . V."""
        for i in range(strips * blocks * 2):
            p_frag[i] = pack(acc_s[2 * i], acc_s[2 * i + 1])

    @cuda.jit(device=True, inline="always")
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
