"""Transforms scores before softmax, and widens 16-bit elements, as LLVM vectors (see build.py)."""

# mypy: ignore-errors

from llvmlite import ir

from .build import I8, I16, I32, I64, LOG2_E, PANEL_VECTORS, declare, exp2_vectors, loop, vector_function

# Cephes' tanh below 0.625: x + x z P(z) / Q(z), z = x^2; float32 needs no Q.
TANH_LIMIT = 0.625
TANH_P4 = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
TANH_P8 = (-9.64399179425052238628e-1, -9.92877231001918586564e1, -1.61468768441708447952e3)
TANH_Q8 = (1.0, 1.12811678491632931402e2, 2.23548839060100448583e3, 4.84406305325125486048e3)


def _polynomial(b, shape, x, terms):
    y = shape.const(terms[0])
    for term in terms[1:]:
        y = shape.fma(b, y, x, shape.const(term))
    return y


def _tanh(b, shape, x):
    """tanh, relative error of a few ulp near 0 as well, where (1 - e) / (1 + e) has lost its digits."""
    size = b.call(declare(b, f"llvm.fabs.{shape.name}", shape.vector, [shape.vector]), [x])
    z = b.fmul(x, x)
    if shape.bytes == 4:
        small = _polynomial(b, shape, z, TANH_P4)
    else:
        small = b.fdiv(_polynomial(b, shape, z, TANH_P8), _polynomial(b, shape, z, TANH_Q8))
    small = shape.fma(b, b.fmul(small, z), x, x)
    (e,) = exp2_vectors(b, shape, [b.fmul(size, shape.const(-2 * LOG2_E))])
    large = b.fdiv(b.fsub(shape.const(1.0), e), b.fadd(shape.const(1.0), e))
    copysign = declare(b, f"llvm.copysign.{shape.name}", shape.vector, [shape.vector] * 2)
    return b.select(b.fcmp_ordered("<", size, shape.const(TANH_LIMIT)), small, b.call(copysign, [large, x]))


@vector_function("iix")
def scale_scores(b, shape, s, count, scale):
    """s *= scale. count, here and below, is a multiple of a vector's width."""
    s, scale = shape.pointer(b, s), shape.splat(b, scale)

    def body(i, _):
        shape.store(b, b.fmul(shape.load(b, s, i), scale), s, i)
        return []

    loop(b, I64(0), count, I64(shape.width), [], body)


@vector_function("iix")
def cap_scores(b, shape, s, count, cap):
    """s = cap * tanh(s / cap)."""
    s, cap = shape.pointer(b, s), shape.splat(b, cap)

    def body(i, _):
        x = b.fdiv(shape.load(b, s, i), cap)
        shape.store(b, b.fmul(_tanh(b, shape, x), cap), s, i)
        return []

    loop(b, I64(0), count, I64(shape.width), [], body)


def capping_with_slopes(times):
    """cap_scores with slopes: an intrinsic (s, slopes, count, cap, zero)."""

    def build(b, shape, s, slopes, count, cap):
        """s = cap * tanh(s / cap), and slopes = the cap's derivative, 1 - tanh(s / cap)^2; `times`: slopes *= it."""
        s, slopes, cap = shape.pointer(b, s), shape.pointer(b, slopes), shape.splat(b, cap)

        def body(i, _):
            y = _tanh(b, shape, b.fdiv(shape.load(b, s, i), cap))
            shape.store(b, b.fmul(y, cap), s, i)
            slope = b.fmul(b.fsub(shape.const(1.0), y), b.fadd(shape.const(1.0), y))
            shape.store(b, b.fmul(slope, shape.load(b, slopes, i)) if times else slope, slopes, i)
            return []

        loop(b, I64(0), count, I64(shape.width), [], body)

    build.__name__ = f"cap_scores{'_times' if times else ''}_slopes"
    return vector_function("iiix")(build)


cap_scores_slopes, cap_scores_times_slopes = capping_with_slopes(False), capping_with_slopes(True)


@vector_function("iiii")
def slope_scores(b, shape, s, keys, slopes, distances):
    """ALiBi on a panel: s (keys, lanes) -= slopes * |distances - key|, both (lanes,), distances from key 0."""
    s, slopes, distances = (shape.pointer(b, x) for x in (s, slopes, distances))
    fabs = declare(b, f"llvm.fabs.{shape.name}", shape.vector, [shape.vector])
    at = [I64(v * shape.width) for v in range(PANEL_VECTORS)]
    negative = [b.fneg(shape.load(b, slopes, x)) for x in at]
    starts = [shape.load(b, distances, x) for x in at]

    def body(key, _):
        number = shape.splat(b, b.sitofp(key, shape.scalar))
        for x, slope, start in zip(at, negative, starts, strict=True):
            place = b.add(b.mul(key, I64(shape.lanes)), x)
            distance = b.call(fabs, [b.fsub(start, number)])
            # Rounded twice, as a plain formula does it.
            shape.store(b, b.fadd(shape.load(b, s, place), b.fmul(slope, distance)), s, place)
        return []

    loop(b, I64(0), keys, I64(1), [], body)


@vector_function("iiiii")
def mask_scores(b, shape, s, step, keys, mask, stride):
    """s[key * step] = -inf where the mask's byte is 0; mask's bytes lie `stride` apart.

    In plain arithmetic: of a comparison LLVM makes a jump, which costs more than the scores if the mask is random.
    """
    s = b.inttoptr(s, shape.int.as_pointer())
    infinity = b.bitcast(ir.Constant(shape.scalar, float("-inf")), shape.int)

    def body(key, _):
        place = b.gep(s, [b.mul(key, step)])
        kept = b.load(b.inttoptr(b.add(mask, b.mul(key, stride)), I8.as_pointer()))
        is_kept = b.lshr(b.add(b.zext(kept, shape.int), shape.int(255)), shape.int(8))  # 0 or 1
        keep = b.neg(is_kept)
        b.store(b.or_(b.and_(b.load(place), keep), b.and_(infinity, b.not_(keep))), place)
        return []

    loop(b, I64(0), keys, I64(1), [], body)


def _widen(b, bits, half):
    """float32 from the 16 bits of a float16 or bfloat16; one element or a vector of them.

    float16: scaling by 2^112 moves the exponent and makes subnormals normal. By integers, because not
    every processor has the instruction and LLVM then calls a library that may not be there.
    """
    ints, floats = I32, ir.FloatType()

    def const(kind, value):
        return ir.Constant(kind, value)

    if isinstance(bits.type, ir.VectorType):
        count = bits.type.count
        ints, floats = ir.VectorType(I32, count), ir.VectorType(floats, count)

        def const(kind, value):
            return ir.Constant(kind, [value] * count)

    bits = b.zext(bits, ints)
    if not half:
        return b.bitcast(b.shl(bits, const(ints, 16)), floats)
    sign = b.shl(b.and_(bits, const(ints, 0x8000)), const(ints, 16))
    magnitude = b.shl(b.and_(bits, const(ints, 0x7FFF)), const(ints, 13))
    finite = b.bitcast(b.fmul(b.bitcast(magnitude, floats), const(floats, 2.0**112)), ints)
    special = b.or_(magnitude, const(ints, 0x7F800000))
    is_special = b.icmp_unsigned(">=", magnitude, const(ints, 0x7C00 << 13))
    return b.bitcast(b.or_(sign, b.select(is_special, special, finite)), floats)


def widen_row(half):
    """Numbers from `count` 16-bit elements in a row: an intrinsic (to, source, count, zero)."""

    def build(b, shape, to, source, count):
        """to (count,) = source (count,) float16 or bfloat16, both contiguous."""
        to, source = shape.pointer(b, to), b.inttoptr(source, I16.as_pointer())
        kind = ir.VectorType(I16, shape.width)
        whole = b.and_(count, I64(-shape.width))

        def vectors(i, _):
            bits = b.load(b.bitcast(b.gep(source, [i]), kind.as_pointer()), align=2)
            shape.store(b, exactly(_widen(b, bits, half), shape.vector), to, i)
            return []

        def scalars(i, _):
            bits = b.load(b.gep(source, [i]))
            b.store(exactly(_widen(b, bits, half), shape.scalar), b.gep(to, [i]))
            return []

        def exactly(x, kind):
            return x if x.type == kind else b.fpext(x, kind)

        loop(b, I64(0), whole, I64(shape.width), [], vectors)
        loop(b, whole, count, I64(1), [], scalars)

    build.__name__ = f"widen_{'half' if half else 'bfloat'}"
    return vector_function("iii")(build)


widen_half, widen_bfloat = widen_row(True), widen_row(False)


@vector_function("iiix")
def scaled_row(b, shape, to, source, count, scale):
    """to (count,) = scale * source (count,), both contiguous and of the precision."""
    to, source, scales = shape.pointer(b, to), shape.pointer(b, source), shape.splat(b, scale)
    whole = b.and_(count, I64(-shape.width))

    def vectors(i, _):
        shape.store(b, b.fmul(shape.load(b, source, i), scales), to, i)
        return []

    def scalars(i, _):
        b.store(b.fmul(b.load(b.gep(source, [i])), scale), b.gep(to, [i]))
        return []

    loop(b, I64(0), whole, I64(shape.width), [], vectors)
    loop(b, whole, count, I64(1), [], scalars)
