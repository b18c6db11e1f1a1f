"""A panel of query rows: scores, softmax and values, as LLVM vectors (see build.py).

The rows lie along the vector. Row r of a panel is computed by the same operations in the same order
whatever the other rows, so its bits do not depend on what it is packed with.
"""

# mypy: ignore-errors

from llvmlite import ir

from .build import I64, PANEL_VECTORS, exp2_vectors, loop, vector_function

FAR = 2.0**24  # in powers of 2; from here on float32 numbers are 2 apart
CHAINS = 4  # independent chains of additions or comparisons
TOGETHER = 2  # keys that softmax takes at once: two chains of operations a vector hide each other's latency


def _product(b, shape, rows, depth, scalar_at, panel, store, guarded=False, count=PANEL_VECTORS):
    """rows x panel register tile: sum over i < depth of scalar_at(row, i) * panel[i], then store(row, v, sum).

    guarded: a term whose panel element is 0 is left out, so that 0 times NaN adds nothing. count: the vectors of the
    panel that have rows.
    """
    zero = shape.const(0.0)
    tile = [(row, v) for row in range(rows) for v in range(count)]

    def body(i, sums):
        base = b.mul(i, I64(shape.lanes))
        vectors = [shape.load(b, panel, b.add(base, I64(v * shape.width))) for v in range(count)]
        results = []
        for row in range(rows):
            x = shape.splat(b, b.load(scalar_at(row, i)))
            for v in range(count):
                old = sums[row * count + v]
                new = shape.fma(b, x, vectors[v], old)
                results.append(b.select(b.fcmp_unordered("!=", vectors[v], zero), new, old) if guarded else new)
        return results

    sums = loop(b, I64(0), depth, I64(1), [zero] * len(tile), body)
    for (row, v), total in zip(tile, sums, strict=True):
        store(row, v, total)


def score_rows(rows, count=PANEL_VECTORS):
    """s[row] = k[row] . q for `rows` keys: an intrinsic (s, k, k_stride, q, head_dim, zero)."""

    def build(b, shape, s, k, k_stride, q, depth):
        """s (rows, lanes) = k (rows, head_dim, contiguous along it) @ q (head_dim, lanes), 0 behind `count` vectors."""
        s, q = shape.pointer(b, s), shape.pointer(b, q)
        keys = [shape.pointer(b, b.add(k, b.mul(k_stride, I64(row)))) for row in range(rows)]

        def store(row, v, total):
            shape.store(b, total, s, I64(row * shape.lanes + v * shape.width))

        _product(b, shape, rows, depth, lambda row, i: b.gep(keys[row], [i]), q, store, count=count)
        for row in range(rows):
            for v in range(count, PANEL_VECTORS):
                store(row, v, shape.const(0.0))

    build.__name__ = f"score_rows_{rows}_{count}"
    return vector_function("iiiii")(build)


def value_rows(rows, guarded=False, count=PANEL_VECTORS):
    """`rows` elements of every v row into `count` vectors of o: an intrinsic (o, alpha, v, v_stride, p, keys, zero)."""

    def build(b, shape, o, alpha, v, v_stride, p, keys):
        """o (rows, lanes) = alpha * o + v (keys, rows)^T @ p (keys, lanes).

        The tile's sum starts from zero and meets o once: shorter chains of additions, smaller error.
        """
        o, p, alpha = shape.pointer(b, o), shape.pointer(b, p), shape.pointer(b, alpha)
        alphas = [shape.load(b, alpha, I64(at * shape.width)) for at in range(PANEL_VECTORS)]

        def scalar_at(row, i):
            return b.gep(shape.pointer(b, b.add(v, b.mul(v_stride, i))), [I64(row)])

        def store(row, at, total):
            index = I64(row * shape.lanes + at * shape.width)
            shape.store(b, shape.fma(b, shape.load(b, o, index), alphas[at], total), o, index)

        _product(b, shape, rows, keys, scalar_at, p, store, guarded, count)

    build.__name__ = f"value_rows_{rows}_{count}{'_guarded' if guarded else ''}"
    return vector_function("iiiiii")(build)


def pack_rows(rows):
    """v's columns in whole blocks of `rows`: an intrinsic (to, v, v_stride, keys, width, zero).

    value_rows goes through a block once per panel. In place, a row of v is a cache line of its own, and lines
    that lie a power of two apart drive each other out of the first-level cache.
    """

    def build(b, shape, to, v, v_stride, keys, width):
        """to (blocks, keys, rows) = v (keys, width), as many blocks as are whole."""
        kind = ir.VectorType(shape.scalar, rows).as_pointer()
        size = shape.bytes
        whole = b.mul(b.sdiv(width, I64(rows)), I64(rows))

        def row(i, _):
            source = b.add(v, b.mul(v_stride, i))
            target = b.add(to, b.mul(i, I64(rows * size)))

            def block(at, _):
                x = b.load(b.inttoptr(b.add(source, b.mul(at, I64(size))), kind), align=size)
                place = b.add(target, b.mul(b.mul(at, keys), I64(size)))
                b.store(x, b.inttoptr(place, kind), align=size)
                return []

            loop(b, I64(0), whole, I64(rows), [], block)
            return []

        loop(b, I64(0), keys, I64(1), [], row)

    build.__name__ = f"pack_rows_{rows}"
    return vector_function("iiiii")(build)


def exponents(b, shape, m_old, m_new, scale):
    """-> (base, shift, rescale) of each pair of vectors: p = exp2(scale * (s - base) - shift), and rescale before exp2.

    base is 0 and shift scale * m_new, which costs one operation a score, but where that is FAR from 0: its rounding
    would be all that is left in the exponent. There base is m_new, which has to be taken from the scores (take_base).
    So it is where a mask was written as the lowest number there is. rescale leads from one kind to the other exactly.
    """
    zero, infinity = shape.const(0.0), shape.const(float("-inf"))
    low, high = shape.const(-FAR), shape.const(FAR)
    bases, shifts, rescales = [], [], []
    for old, new in zip(m_old, m_new, strict=True):
        of_old, of_new = b.fmul(old, scale), b.fmul(new, scale)
        finite_old, finite_new = (b.fcmp_ordered("==", b.fmul(x, zero), zero) for x in (old, new))
        near_old, near_new = (
            b.and_(b.fcmp_ordered("<", low, x), b.fcmp_ordered("<", x, high)) for x in (of_old, of_new)
        )
        far_old, far_new = b.and_(finite_old, b.not_(near_old)), b.and_(finite_new, b.not_(near_new))
        shift = b.select(b.or_(far_new, b.fcmp_ordered("==", new, infinity)), zero, of_new)
        to_shift = b.select(far_old, shape.fma(b, old, scale, b.fneg(shift)), b.fsub(of_old, shift))
        rounding = b.select(b.and_(finite_old, near_old), shape.fma(b, old, scale, b.fneg(of_old)), zero)
        to_base = b.fsub(b.fmul(b.fsub(old, new), scale), rounding)
        bases.append(b.select(far_new, new, zero))
        shifts.append(shift)
        rescales.append(b.select(far_new, to_base, to_shift))
    return bases, shifts, rescales


def take_base(b, shape, s, at, end, step, bases):
    """s -= base in rows `step` apart up to `end`, vectors `at` of each; where all bases are 0 nothing is done."""
    zero = shape.const(0.0)
    used = bases[0]
    for base in bases[1:]:
        used = b.select(b.fcmp_unordered("!=", base, zero), base, used)
    squares = b.select(b.fcmp_unordered("!=", used, zero), shape.const(1.0), zero)
    any_used = b.fcmp_ordered("!=", shape.across(b, "fadd", squares), ir.Constant(shape.scalar, 0.0))

    def row(i, _):
        for x, base in zip(at, bases, strict=True):
            place = b.add(i, x)
            shape.store(b, b.fsub(shape.load(b, s, place), base), s, place)
        return []

    loop(b, I64(0), b.select(any_used, end, I64(0)), step, [], row)


@vector_function("iii")
def subtract_base(b, shape, s, keys, base):
    """s (keys, lanes) -= base (lanes,), which is nearly always 0."""
    s, base = shape.pointer(b, s), shape.pointer(b, base)
    at, step = [I64(v * shape.width) for v in range(PANEL_VECTORS)], I64(shape.lanes)
    take_base(b, shape, s, at, b.mul(keys, step), step, [shape.load(b, base, x) for x in at])


@vector_function("iixiii")
def softmax_panel(b, shape, s, keys, scale_log2, m, l, alpha):
    """One online softmax step over scores s (keys, lanes), in place: s becomes p = exp2(c * (s - m)).

    m, l and alpha are (lanes,): m, the maximum so far in units of s, and l, the sum so far, are
    updated; alpha, by which o has to be multiplied, is written. A row that has seen nothing but -inf
    keeps m = -inf and l = 0 and gets p = 0.
    """
    s, m, l, alpha = (shape.pointer(b, x) for x in (s, m, l, alpha))
    scale = shape.splat(b, scale_log2)
    at = [I64(v * shape.width) for v in range(PANEL_VECTORS)]
    m_old = [shape.load(b, m, x) for x in at]
    end = b.mul(keys, I64(shape.lanes))
    step = I64(shape.lanes)

    m_new = loop(
        b,
        I64(0),
        end,
        step,
        m_old,
        lambda i, best: [shape.max(b, shape.load(b, s, b.add(i, x)), y) for x, y in zip(at, best, strict=True)],
    )
    bases, shifts, rescales = exponents(b, shape, m_old, m_new, scale)
    take_base(b, shape, s, at, end, step, bases)
    shifts, rescales = [b.fneg(shift) for shift in shifts], exp2_vectors(b, shape, rescales)
    for x, new, rescale in zip(at, m_new, rescales, strict=True):
        shape.store(b, rescale, alpha, x)
        shape.store(b, new, m, x)

    def weights(together):
        def body(i, sums):
            places = [
                b.add(i, I64(n * shape.lanes + v * shape.width)) for n in range(together) for v in range(PANEL_VECTORS)
            ]
            xs = [
                shape.fma(b, shape.load(b, s, place), scale, shifts[n % PANEL_VECTORS])
                for n, place in enumerate(places)
            ]
            for n, (place, p) in enumerate(zip(places, exp2_vectors(b, shape, xs), strict=True)):
                shape.store(b, p, s, place)
                sums[n % PANEL_VECTORS] = b.fadd(sums[n % PANEL_VECTORS], p)
            return sums

        return body

    pairs = b.mul(b.and_(keys, I64(-TOGETHER)), step)
    sums = loop(b, I64(0), pairs, I64(TOGETHER * shape.lanes), [shape.const(0.0)] * PANEL_VECTORS, weights(TOGETHER))
    sums = loop(b, pairs, end, step, sums, weights(1))
    for x, total, rescale in zip(at, sums, rescales, strict=True):
        shape.store(b, shape.fma(b, shape.load(b, l, x), rescale, total), l, x)


def _in_chains(b, shape, count, chains, step):
    """-> chains, and how many of `count` numbers are in whole vectors: chain = step(i, chain) for the vector at each i.

    The chains take turns, so that none waits for its own last operation.
    """
    together = len(chains) * shape.width
    rounds, whole = b.and_(count, I64(-together)), b.and_(count, I64(-shape.width))

    def of_all(i, before):
        return [step(b.add(i, I64(n * shape.width)), chain) for n, chain in enumerate(before)]

    first, *others = loop(b, I64(0), rounds, I64(together), chains, of_all)
    rest = loop(b, rounds, whole, I64(shape.width), [first], lambda i, before: [step(i, before[0])])
    return [*rest, *others], whole


@vector_function("ii", "x")
def largest(b, shape, x, count):
    """The maximum of x (count,), contiguous; -inf of nothing."""
    x, lowest = shape.pointer(b, x), float("-inf")

    def scalars(i, best):
        value = b.load(b.gep(x, [i]))
        return [b.select(b.fcmp_ordered(">", value, best[0]), value, best[0])]

    def vector(i, best):
        return shape.max(b, shape.load(b, x, i), best)

    (one, *others), whole = _in_chains(b, shape, count, [shape.const(lowest)] * CHAINS, vector)
    for other in others:
        one = shape.max(b, other, one)
    of_vectors = shape.across(b, "fmax", one)
    (scalar,) = loop(b, whole, count, I64(1), [ir.Constant(shape.scalar, lowest)], scalars)
    return b.select(b.fcmp_ordered(">", scalar, of_vectors), scalar, of_vectors)


@vector_function("iiii", "i")
def all_finite(b, shape, x, stride, width, rows):
    """1 when every element of x (rows, width), contiguous along width, is finite, else 0."""
    zero = ir.Constant(shape.scalar, 0.0)

    def row(r, sums):
        base = shape.pointer(b, b.add(x, b.mul(r, stride)))

        def vector(i, total):
            return b.fadd(total, b.fmul(shape.load(b, base, i), shape.const(0.0)))

        def scalars(i, total):
            return [b.fadd(total[0], b.fmul(b.load(b.gep(base, [i])), zero))]

        *chains, scalar = sums
        chains, whole = _in_chains(b, shape, width, chains, vector)
        return [*chains, *loop(b, whole, width, I64(1), [scalar], scalars)]

    *chains, total = loop(b, I64(0), rows, I64(1), [shape.const(0.0)] * CHAINS + [zero], row)
    for chain in chains:
        total = b.fadd(total, shape.across(b, "fadd", chain))  # 0 times NaN or Inf is NaN, and stays
    return b.zext(b.fcmp_ordered("==", total, zero), I64)
