"""A single query row: scores, softmax and values with keys or head_dim along the vector (see build.py).

For a few rows (decoding) a panel would be mostly empty; here nothing is, and K and V are read once a row.
"""

# mypy: ignore-errors

from llvmlite import ir

from .build import I64, exp2_vectors, loop, vector_function
from .panel import exponents, take_base


def dot_rows(rows):
    """s[row] = k[row] . q for `rows` keys: an intrinsic (s, step, k, k_stride, q, head_dim, zero)."""

    def build(b, shape, s, step, k, k_stride, q, depth):
        """s (rows,), elements `step` apart, = k (rows, head_dim) @ q (head_dim,), both contiguous along head_dim."""
        s, q = shape.pointer(b, s), shape.pointer(b, q)
        keys = [shape.pointer(b, b.add(k, b.mul(k_stride, I64(row)))) for row in range(rows)]
        whole = b.and_(depth, I64(-shape.width))

        def vectors(i, sums):
            x = shape.load(b, q, i)
            return [shape.fma(b, shape.load(b, key, i), x, total) for key, total in zip(keys, sums, strict=True)]

        def scalars(i, sums):
            x = b.load(b.gep(q, [i]))
            return [shape.fma(b, b.load(b.gep(key, [i])), x, total) for key, total in zip(keys, sums, strict=True)]

        sums = loop(b, I64(0), whole, I64(shape.width), [shape.const(0.0)] * rows, vectors)
        sums = [shape.across(b, "fadd", total) for total in sums]
        sums = loop(b, whole, depth, I64(1), sums, scalars)
        for row, total in enumerate(sums):
            b.store(total, b.gep(s, [b.mul(step, I64(row))]))

    build.__name__ = f"dot_rows_{rows}"
    return vector_function("iiiiii")(build)


@vector_function("iixiii")
def softmax_row(b, shape, s, keys, scale_log2, m, l, alpha):
    """softmax_panel for one row: s is (keys,), and m, l and alpha are one number each.

    Owed by the caller: -inf in s behind the last key, up to a whole vector.
    """
    s, m, l, alpha = (shape.pointer(b, x) for x in (s, m, l, alpha))
    m_old = b.load(m)
    (best,) = loop(
        b,
        I64(0),
        keys,
        I64(shape.width),
        [shape.splat(b, m_old)],
        lambda i, t: [shape.max(b, shape.load(b, s, i), t[0])],
    )
    m_new = shape.across(b, "fmax", best)
    scale = shape.splat(b, scale_log2)
    bases, (shift,), rescales = exponents(b, shape, [shape.splat(b, m_old)], [shape.splat(b, m_new)], scale)
    take_base(b, shape, s, [I64(0)], keys, I64(shape.width), bases)
    shifts, (rescale,) = b.fneg(shift), exp2_vectors(b, shape, rescales)
    rescale = b.extract_element(rescale, ir.IntType(32)(0))

    def weights(i, t):
        (p,) = exp2_vectors(b, shape, [shape.fma(b, shape.load(b, s, i), scale, shifts)])
        shape.store(b, p, s, i)
        return [b.fadd(t[0], p)]

    (total,) = loop(b, I64(0), keys, I64(shape.width), [shape.const(0.0)], weights)
    b.store(shape.fma(b, b.load(l), rescale, shape.across(b, "fadd", total)), l)
    b.store(m_new, m)
    b.store(rescale, alpha)


def value_columns(vectors, guarded=False):
    """sums += p @ v for a few columns of v: an intrinsic (sums, v, v_stride, p, step, keys, zero).

    vectors: how many vectors of columns; 0 stands for a single column.
    """

    def build(b, shape, total, v, v_stride, p, step, keys):
        """total (columns,) += p (keys,), elements `step` apart, @ v (keys, columns); guarded: p = 0 leaves the key out.
        Keys are added one after the other, so that a part of them in one call and the others in the next give the same
        bits."""
        total, p = shape.pointer(b, total), shape.pointer(b, p)
        columns = [I64(at * shape.width) for at in range(vectors)]
        zero = ir.Constant(shape.scalar, 0.0)

        def body(i, sums):
            row = shape.pointer(b, b.add(v, b.mul(v_stride, i)))
            weight = b.load(b.gep(p, [b.mul(i, step)]))
            if vectors:
                x = shape.splat(b, weight)
                new = [shape.fma(b, x, shape.load(b, row, at), t) for at, t in zip(columns, sums, strict=True)]
            else:
                new = [shape.fma(b, weight, b.load(row), sums[0])]
            if guarded:
                seen = b.fcmp_unordered("!=", weight, zero)
                new = [b.select(seen, y, old) for y, old in zip(new, sums, strict=True)]
            return new

        if vectors:
            sums = loop(b, I64(0), keys, I64(1), [shape.load(b, total, at) for at in columns], body)
            for at, found in zip(columns, sums, strict=True):
                shape.store(b, found, total, at)
        else:
            (found,) = loop(b, I64(0), keys, I64(1), [b.load(total)], body)
            b.store(found, total)

    build.__name__ = f"value_columns_{vectors}{'_guarded' if guarded else ''}"
    return vector_function("iiiiii")(build)


@vector_function("iiii")
def rescale_row(b, shape, o, alpha, total, count):
    """o (count,) = alpha * o + total."""
    o, total = shape.pointer(b, o), shape.pointer(b, total)
    rescale = b.load(shape.pointer(b, alpha))
    x, whole = shape.splat(b, rescale), b.and_(count, I64(-shape.width))

    def vectors(i, _):
        shape.store(b, shape.fma(b, shape.load(b, o, i), x, shape.load(b, total, i)), o, i)
        return []

    def scalars(i, _):
        at = b.gep(o, [i])
        b.store(shape.fma(b, b.load(at), rescale, b.load(b.gep(total, [i]))), at)
        return []

    loop(b, I64(0), whole, I64(shape.width), [], vectors)
    loop(b, whole, count, I64(1), [], scalars)
